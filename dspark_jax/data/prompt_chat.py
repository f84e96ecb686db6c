"""Everyday prompts: explanation, lists, dialogue, writing, work on a given text, knowledge."""

from dspark_jax.data.prompt_slots import FIELDS, NAMES, PLACES, TOPICS, fill, pick

_SLOTS = {
  "topic": TOPICS, "name": NAMES, "place": PLACES,
  "n": tuple(str(i) for i in range(3, 11)), "words": ("40", "60", "80", "100", "120", "150", "200"),
  "audience": (
    "a ten-year-old", "a curious teenager", "my grandmother", "a first-year student", "an engineer",
    "a busy manager", "someone who has never heard of it", "a class of twelve-year-olds",
    "a journalist on deadline", "a sceptical friend", "a new colleague", "a visitor to a museum",
    "an expert in another field", "a group of pensioners", "a policy maker", "a poet"),
  "style": (
    "in plain words", "with an everyday comparison", "in three short paragraphs",
    "in one paragraph",
    "as a list of key points", "with one concrete example", "without jargon", "in two sentences",
    "as a short dialogue", "with a small table", "and say what is still unknown",
    "starting from a common misunderstanding", "as if it were a cooking recipe"),
  "role": (
    "a lighthouse keeper", "a patient maths teacher", "a grumpy librarian", "a medieval blacksmith",
    "a tour guide", "a job interviewer", "a talking cat", "a space-station engineer", "a chef",
    "a detective in the 1920s", "a football coach", "a ship's captain", "a village doctor",
    "a museum guard at night", "a radio presenter", "a travelling salesman", "a robot gardener",
    "an old clockmaker", "a customer-support agent", "a mountain guide", "a gentle dragon"),
  "mood": ("cheerful", "melancholy", "suspenseful", "humorous", "hopeful", "dry", "dreamy", "tense",
           "formal", "warm", "ironic", "nostalgic"),
  "event": (
    "a school reunion", "a delayed flight", "a birthday party", "a product launch",
    "a team offsite",
    "a broken washing machine", "a lost suitcase", "an overdue library book", "a job application",
    "a noisy neighbour", "a missed deadline", "a charity run", "a wedding", "a parents' evening",
    "a late parcel", "a new puppy", "a rent increase", "a farewell lunch", "a conference talk",
    "a dentist appointment", "a study group", "a garden party", "a double-booked meeting room"),
  "gathering": (
    "a school reunion", "a birthday party", "a product launch", "a charity run", "a wedding",
    "a farewell lunch", "a garden party", "a book fair", "a summer camp", "a quiz night",
    "a street market", "a hackathon", "a family holiday", "an open day", "a choir weekend"),
  "thing": (
    "a lost key", "an old map", "a letter that arrives too late", "the last tram of the night",
    "a garden that blooms in winter", "a violin without strings", "two rival bakers",
    "a paper boat",
    "a town where nobody sleeps", "the first snow", "a broken compass", "an empty theatre",
    "a bridge between two villages", "a clock that runs backwards", "a stray dog", "a red umbrella",
    "a message in a bottle", "the smell of rain", "a borrowed coat", "a lantern in the fog"),
  "form": ("poem", "short story", "haiku", "limerick", "song verse", "fable", "diary entry",
           "monologue", "news report", "fairy tale", "scene for the stage", "postcard"),
  "dish": (
    "lentil soup", "a vegetable curry", "apple cake", "mushroom risotto", "flatbread", "fish tacos",
    "a potato salad", "pancakes without eggs", "roast chicken", "tomato pasta", "chickpea stew",
    "banana bread", "fried rice", "a cheese omelette", "stuffed peppers", "onion tart"),
  "diet": ("vegetarian", "gluten-free", "cheap", "quick", "low-salt", "child-friendly", "festive",
           "dairy-free", "high-protein", "one-pot"),
  "recipient": ("my landlord", "my manager", "a former teacher", "the city council", "a supplier",
                "a close friend", "a new client", "the whole team", "my neighbour", "a hotel"),
}

_EXPLAIN = (
  "Explain {topic} to {audience}.", "Explain {topic} {style}.", "What is meant by {topic}?",
  "Can you explain {topic} to {audience} {style}?", "Why does {topic} matter today?",
  "Give me a short introduction to {topic}, {style}.",
  "I never understood {topic}. Explain it {style}.",
  "What are the most common misconceptions about {topic}?",
  "How would you teach {topic} to {audience}?",
  "Summarise what is known about {topic} in about {words} words.",
  "Compare {topic} and {topic}: what do they share, and where do they differ?",
  "What are the advantages and drawbacks of {topic}?", "What connects {topic} with {topic}?",
  "Describe {topic} {style}. The text is for {audience}.",
  "Write {n} questions and answers about {topic} for {audience}.",
  "Which is harder to explain to {audience}, {topic} or {topic}? Give reasons.",
  "Make an analogy between {topic} and {event}, then say where it breaks down.",
)
_LIST = (
  "List {n} facts about {topic}.", "Give me {n} ideas for {event}.",
  "Name {n} books or films about {topic}.",
  "Make a packing list for {n} days in {place}.", "Plan a {n}-day trip to {place} for {audience}.",
  "Suggest {n} {diet} dinners, with the main ingredients of each.",
  "Give me a {diet} recipe for {dish}.",
  "How do I cook {dish} for {n} people? List the ingredients and the steps.",
  "Write a checklist for {event}.", "What are {n} things to see in {place} on a rainy day?",
  "Give {n} tips on {topic} for {audience}.", "Outline a {n}-week plan to learn about {topic}.",
  "List {n} pros and {n} cons of {topic}, as bullet points.",
  "Suggest {n} names for a shop that sells things for {event}.",
  "Create a table with {n} rows on {topic}: one column for the point, one for an example.",
  "Rank {n} activities in {place} from cheapest to dearest.",
  "Draw up an agenda of {n} points for a meeting about {event}.",
  "Write {n} quiz questions on {topic} with four options each and mark the right one.",
  "Give me a weekly timetable that makes room for {topic} and for {topic}.",
)
_DIALOGUE = (
  "You are {role}. Introduce yourself and ask me about {event}.",
  "Pretend to be {role} and explain {topic} to me.",
  "Write a dialogue between {role} and {role} about {topic}.",
  "Act as {role}. I have a question about {event}: where do I start?",
  "Let us role-play: you are {role} in {place}, and I have just arrived. Greet me.",
  "Write a phone call in which {name} tells {name} about {event}. Keep it {mood}.",
  "As {role}, give {name} some advice on {topic}.",
  "Interview {role} about {topic}. Use {n} questions.",
  "Write a {mood} chat between {name} and {role}, who meet in {place}.",
  "Hi! I am {name}. I feel nervous because of {event}. Can you help me calm down?",
  "Hello, can we talk about {topic}? I only have a few minutes.",
  "Stay in character as {role}: what do you think of {topic}?",
  "Two people disagree about {topic}. Write their {mood} conversation in {n} turns each.",
)
_WRITING = (
  "Write a {mood} {form} about {thing}.", "Write a {form} set in {place} about {thing}.",
  "Write an email to {recipient} about {event}. Keep it under {words} words.",
  "Draft a polite message to {recipient} asking for help with {event}.",
  "Write the opening paragraph of a {mood} novel in which {name} finds {thing}.",
  "Write a speech of {words} words for {gathering}.",
  "Write a {mood} product description for {thing}.",
  "Compose a {form} in which {role} meets {role}.", "Write a cover letter for a job as {role}.",
  "Write a review of a restaurant in {place} that serves {dish}.",
  "Write a blog post of about {words} words on {topic} for {audience}. Use a {mood} tone and end "
  "with a question.",
  "Write an apology to {recipient} because of {event}, and offer a remedy.",
  "Write a {mood} toast for {name} at {gathering}.", "Describe {place} at dawn {style}.",
  "Write a story that begins with the words: '{name} had never believed in {thing}.' It should be "
  "{mood}.",
  "Write an essay on whether {topic} should be taught at school. Give arguments on both sides and "
  "a conclusion.",
  "Write a letter from {name} to {name}, sent from {place}, that mentions {thing}.",
)
_KNOWLEDGE = (
  "What do you know about {topic}?", "Who were important people in the story of {topic}?",
  "When and where did {topic} begin?", "Is it true that {topic} is overrated? Discuss briefly.",
  "What would happen if {topic} did not exist?", "Tell me something surprising about {topic}.",
  "How has the view of {topic} changed in the last hundred years?", "What is {place} famous for?",
  "When is the best time to visit {place}, and why?", "Tell me about the food of {place}.",
  "What should {audience} know before travelling to {place}?", "How did {topic} influence {topic}?",
  "What are open questions about {topic}?", "Give a timeline of {topic} with {n} entries.",
  "How do I get started with {topic}?", "What is a good argument against {topic}?",
  "In the field of {field}, what are {n} key terms? Define each in one line.",
  "Which careers deal with {topic}, and what does one study for them?",
  "Imagine {name} asks you over dinner: what is the point of {topic}? Answer in about {words} "
  "words.",
)

# Sentences for short texts that the prompt then asks to work on: first, middle, last.
_TEXTS = (
  (("The town of {place} opened a new {spot} on {day}.",
    "After {n} years of delay, {place} has its {spot}."),
   ("It cost {cost} million and was paid for by local taxes.",
    "{name}, who led the work, called it a small miracle.",
    "Shop owners nearby hope for more visitors.", "Some residents complain about the noise.",
    "Entry is free for children under {n}.", "About {count} people came on the first day."),
   ("A second one is planned for next year.", "The council will review the costs in {month}.",
    "Critics say that the money was needed elsewhere.")),
  (("Hi team, a few notes from the meeting on {day}.",
    "Dear all, here is what we agreed on {day}."),
   ("{name} will send the figures by {day}.", "The budget for {spot} stays at {cost} thousand.",
    "We still need someone to book the room.", "The client asked for {n} changes to the design.",
    "{name} is on leave until {month}.", "Please do not share the draft outside the team."),
   ("Next meeting: {day} at {n} o'clock.", "Questions go to {name}.", "Thanks, {name}")),
  (("I bought this {item} in {month} and have used it every day.",
    "My {item} arrived {n} days late."),
   ("The battery lasts about {n} hours.", "It is lighter than I expected.",
    "The instructions were hard to follow.",
    "Support answered within {n} minutes and was friendly.",
    "After a few weeks one button stopped working.",
    "For {cost} dollars I had hoped for more."),
   ("I would buy it again.", "I am sending it back.", "All in all it does its job, no more.")),
  (("Bees find their way by the sun.", "Rivers carry more than water.",
    "Bread is older than writing.",
    "Many cities sink a little every year."),
   ("Researchers in {place} followed {count} cases for {n} years.",
    "The effect is small, but it adds up.",
    "{name}, who was not part of the study, finds it convincing.",
    "Earlier work had suggested the opposite.",
    "Weather explains only part of it.", "The data are public since {month}."),
   ("More work is under way.", "What it means for daily life is unclear.",
    "The method may help elsewhere too.")),
)
_TEXT_SLOTS = {
  "name": NAMES, "place": PLACES, "n": tuple(str(i) for i in range(2, 13)),
  "day": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"),
  "month": ("January", "March", "April", "June", "August", "September", "October", "December"),
  "cost": ("12", "18", "25", "40", "55", "75", "90"),
  "count": ("140", "260", "900", "1,200", "3,500"),
  "spot": ("swimming pool", "tram line", "library", "market hall", "bicycle bridge",
           "science museum"),
  "item": ("vacuum cleaner", "phone", "tent", "coffee grinder", "keyboard", "lamp", "rain jacket",
           "camera")}
_TEXT_TASKS = (
  "Summarise this text in one sentence:", "Rewrite the following in a formal tone:",
  "List all names, places and numbers in this text as JSON:",
  "Is the mood of this text positive, negative or mixed? Explain.",
  "Turn this into bullet points:", "Write a headline for this text:", "Translate this into French:",
  "Rewrite this so that a child can follow it:", "What questions does this text leave open?",
  "Shorten this to half its length:", "Put the following text into the past tense:",
  "Correct the style, keep the facts:",
  "Write a reply to this:", "Which sentence is the most important one, and why?",
  "Translate this into Spanish and explain two of the words:",
  "Classify the text as news, email, review or essay, and justify the choice:",
  "Extract the dates and what happens on them:",
  "Rewrite the text as a conversation between two people:",
  "Give this text a more surprising ending:",
)
_CHAT_FOLLOW_UPS = (
  "Now make it half as long.", "Rewrite that as a list.", "Can you give one more example?",
  "Say it again in simpler words.", "What would a critic say to that?",
  "Now turn it into a short poem.",
  "Translate your answer into German.", "Why did you choose that?",
  "Add a title and a closing line.",
  "Which of these points matters most?", "Make the tone more formal.",
  "And what is the counter-argument?")

_CONTEXTS = (
  "I work as {role} and do not have much time.",
  "I live in {place} and English is not my first language.",
  "This is for {event}, so it should sound {mood}.",
  "I have to present this to {audience} on Friday.",
  "I already know the basics, so please go deeper.",
  "{name} asked me for this and I do not know where to begin.",
  "Please be honest where things are disputed.",
  "I tried to find this in books, but they were too technical.")
_WISHES = (
  "Keep the answer under {words} words.", "Use headings.", "End with one question for me.",
  "Please avoid clichés.", "Give sources I could look for.", "Use at most {n} sentences.",
  "Write {style}.", "Finish with a one-line summary.", "Bold the key terms.",
  "Use British spelling.")


# Longer requests: a situation, what is known, what is wanted, each in sentences of their own.
_SITUATIONS = (
  "I am organising {gathering} for about {words} people in {place}, and I have {n} weeks left.",
  "My friend {name} is moving to {place} next month and asked me for help.",
  "I run a small shop in {place}, and for {n} months the number of customers has been falling.",
  "I teach a class of {n} adults who want to understand {topic}, but they have very different "
  "backgrounds.",
  "Our team of {n} has to decide between two offers, and the discussion keeps going in circles.",
  "I am writing a {mood} story about {thing}, set in {place}.",
  "As a first-time manager I have to tell {name} that the work is not good enough.",
  "I want to change my habits this year, mainly when it comes to {topic}.",
  "For a podcast I am preparing an episode on {topic} and {topic}.",
  "My neighbour {name} plays loud music until midnight, {n} nights a week.")
_DETAILS = (
  "The budget is small, about ${words} in all.", "So far I have only a rough idea and a few notes.",
  "{name}, who did this last year, says that the hardest part is getting started.",
  "Some people involved care a lot about {topic}, others not at all.",
  "I have already tried the obvious things, such as asking friends and reading two books.",
  "The weather in {place} at that time of the year is hard to predict.",
  "I am not good at saying no, which has caused trouble with {event} before.",
  "There is a rule that nothing may be changed in the last {n} days.",
  "What worries me most is that {name} might be offended.",
  "Whatever we choose has to work for {audience} as well.",
  "I can spend about {n} hours a week on it.",
  "A similar attempt in {place} failed after {n} months.",
  "In the background there is also the matter of {event}.")
_DEMANDS = (
  "Please give me a plan with {n} steps and say what could go wrong with each.",
  "What would you do in my place? Give {n} options, with one strong and one weak point of each.",
  "Write the message I should send to {name}, in a {mood} tone.",
  "First list the questions I should answer for myself, then suggest an order.",
  "Draft an outline with headings, and write the first paragraph in full.",
  "Explain the trade-offs to me {style}.", "Make a table of tasks, people and deadlines.",
  "Play the part of {role} and give me your frank opinion.",
  "Write a short scene in which {name} and {name} talk this through.",
  "Name the {n} most important points and leave out everything else.")


def make_scenario(rng):
  """Draws a longer request of several sentences: (text, key, follow_up or None)."""
  details = rng.sample(_DETAILS, rng.randint(2, 6))
  demands = rng.sample(_DEMANDS, rng.randint(1, 2))
  parts = [pick(rng, _SITUATIONS), *details, *demands]
  if rng.random() < 0.4:
    parts.append(pick(rng, _WISHES))
  text = " ".join(fill(rng, part, _SLOTS) for part in parts)
  return text, None, pick(rng, _CHAT_FOLLOW_UPS) if rng.random() < 0.15 else None


def _make_from(templates):
  def make(rng):
    text = fill(rng, pick(rng, templates), _SLOTS | {"field": tuple(FIELDS)})
    if rng.random() < 0.30:
      text = fill(rng, pick(rng, _CONTEXTS), _SLOTS) + " " + text
    if rng.random() < 0.25:
      text += " " + fill(rng, pick(rng, _WISHES), _SLOTS)
    return text, None, pick(rng, _CHAT_FOLLOW_UPS) if rng.random() < 0.15 else None
  return make


def make_text_task(rng):
  """Draws a short text with a request to work on it: (text, key, follow_up or None)."""
  opening, middle, closing = pick(rng, _TEXTS)
  sentences = [pick(rng, opening), *rng.sample(middle, rng.randint(2, 5)), pick(rng, closing)]
  passage = fill(rng, " ".join(sentences), _TEXT_SLOTS)
  task = pick(rng, _TEXT_TASKS)
  text = pick(rng, (f"{task}\n\n{passage}", f'{task}\n"{passage}"', f"{passage}\n\n{task}"))
  return text, passage, pick(rng, _CHAT_FOLLOW_UPS) if rng.random() < 0.15 else None


make_explanation = _make_from(_EXPLAIN)
make_list = _make_from(_LIST)
make_dialogue = _make_from(_DIALOGUE)
make_writing = _make_from(_WRITING)
make_knowledge = _make_from(_KNOWLEDGE)
