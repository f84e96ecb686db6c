"""Word problems and exercises with drawn numbers, and small reasoning puzzles."""

from dspark_jax.data.prompt_slots import NAMES, PLACES, pick

_GOODS = ("apples", "notebooks", "candles", "stamps", "muffins", "marbles", "tickets", "pencils",
          "plants", "chairs", "bricks", "postcards", "oranges", "batteries", "shells", "mugs",
          "cookies", "tiles", "books", "buttons", "eggs", "bottles", "lamps", "badges")
_SHOPS = ("bakery", "garden centre", "market stall", "school shop", "museum", "library sale",
          "farm",
          "toy shop", "station kiosk", "hardware store")
_ENDINGS = ("", "", " Show your steps.", " Explain your reasoning.", " Give only the final number.",
            " Think step by step.", " Check the result at the end.", " Solve it with an equation.")

_PROBLEMS = (
  "{name} buys {a} {goods} at ${b} each and pays with ${hundreds}. How much change is due?",
  "A {shop} sells {a} {goods} on Monday and {b} more than that on Tuesday. How many in the two "
  "days?",
  "{name} has {c} {goods} and gives {p}% of them to {other}. How many are left?",
  "A train leaves {place} at {h}:00 and travels at {speed} km/h. How far is it from {place} at "
  "{h2}:30?",
  "{name} and {other} share {c} {goods} in the ratio {s}:{t}. How many does each get?",
  "A rectangular field in {place} is {a} m long and {b} m wide. Find its area and its perimeter.",
  "The price of a jacket in a {shop} rises by {p}% and then falls by {p}%. It cost ${c} at first. "
  "What does it cost now?",
  "{name} reads {a} pages a day. The book has {c} pages. After how many days is it finished?",
  "If {s} workers lay {c} bricks in {t} hours, how many bricks do {a} workers lay in {b} hours?",
  "{name} saves ${a} a month. {other} starts with ${c} and spends ${b} a month. After how many "
  "months does {name} have more?",
  "A tank in {place} holds {c} litres. It fills at {a} litres a minute and leaks {s} litres a "
  "minute. How long until it is full?",
  "The average of {s} numbers is {a}. One more number, {b}, is added. What is the new average?",
  "{name} puts ${hundreds} in a bank at {t}% interest a year, compounded yearly. How much is there "
  "after {s} years?",
  "A box in the {shop} holds {a} red and {b} blue {goods}. Two are drawn without looking. What is "
  "the chance that both are red?",
  "{name} is {s} times as old as {other}. In {t} years their ages add up to {c}. How old are they "
  "now?",
  "A recipe for {s} people needs {c} g of flour. How much flour does {name} need for {a} people?",
  "{name} walks {a} minutes at {t} km/h and then cycles {b} minutes at {speed} km/h. How far is "
  "that in all?",
  "A {shop} packs {goods} in boxes of {a}. There are {c} {goods}. How many full boxes are there "
  "and how many are left over?",
  "{name} scores {a}, {b} and {x} points in three games. What is needed in the fourth game for an "
  "average of {y}?",
  "A taxi in {place} charges ${s} plus ${t} a kilometre. {name} pays ${a}. How long was the ride?",
)
_EXERCISES = (
  "What is {a} * {b} + {c}?", "Compute {c} - {a} * {s}.", "Solve for x: {s}x + {a} = {c}.",
  "Simplify the fraction {c}/{hundreds}.", "What is {p}% of {c}?", "Find the prime factors of {c}.",
  "Factor x^2 + {a}x + {b} if possible, and find its roots.",
  "What is the remainder of {c} divided by {s}?",
  "Write {c} in binary and in hexadecimal.",
  "Find the greatest common divisor of {c} and {hundreds}.",
  "Differentiate f(x) = {s}x^3 - {a}x + {b}.", "Integrate {s}x^2 + {t}x from 0 to {x}.",
  "Solve the system: x + y = {c}, x - y = {a}.",
  "Convert {a} miles to kilometres and {b} kg to pounds.",
  "List the first {s} terms of the sequence that starts at {a} and grows by {b}.",
  "What is the sum of all whole numbers from {a} to {c}?",
  "Round {a}.{b} to one decimal place and to the nearest ten.",
  "Find the slope of the line through ({a}, {b}) and ({x}, {y}).",
  "Is {c} divisible by {s}? By {t}? Why?",
  "A circle has radius {a} cm. What are its area and circumference?",
  "The legs of a right triangle are {a} and {b}. How long is the hypotenuse?",
  "How many ways are there to choose {s} of {x} people?", "Evaluate 2^{s} + 3^{t}.",
  "Find the median and the mean of {a}, {b}, {c}, {x}, {y}.",
  "What is the probability of rolling at least one {t1} in {s} throws of a die?",
)
_EXERCISE_LEADS = ("", "", "Quick question: ", "Homework help, please. ", "For a maths quiz: ",
                   "I keep getting this wrong. ", "Check me on this one: ",
                   "Teach me how to do this: ")

_PUZZLES = (
  "{name}, {other} and {third} sit in a row. {name} is not at the left end, and {other} sits right "
  "of {third}. Who sits in the middle?",
  "All {goods} in the box are heavy. Some heavy things are blue. Does it follow that some {goods} "
  "are blue? Explain.",
  "{name} is taller than {other}. {third} is shorter than {other}. Who is tallest, and who is "
  "shortest?",
  "If it rains in {place}, {name} stays at home. {name} is not at home. What do we know about the "
  "weather in {place}?",
  "A clock in {place} loses {s} minutes every hour. It was right at {h} o'clock. What does it show "
  "{t} hours later?",
  "{name} has two boxes: one with {a} {goods}, one with {b}. Moving how many makes them equal, if "
  "that can be done?",
  "Three friends, {name}, {other} and {third}, each like a different one of tea, coffee and juice. "
  "{name} hates coffee, {other} drinks juice. Who drinks what?",
  "You see {s} {goods}, and take away {t1}. How many do you have? Explain why the wording matters.",
  "{name} says that {other} always lies. {other} says that {third} tells the truth. {third} says "
  "nothing. What can be concluded?",
  "Which is the odd one out, and why: {g1}, {g2}, {g3}, the river near {place}?",
  "It takes one person {s} hours to paint a fence, another {t} hours. {name} claims together they "
  "need {a} hours. Is this possible?",
  "{name} left {place} on a Friday and came back {a} days later. What day of the week was it?",
  "A shelf has {s} rows of {t} {goods}, but the top row is missing {t1}. How many are there? "
  "{name} says {a}. Is that right?",
  "Give arguments for and against this plan: {name} wants to move from {place} to {place2} to sell "
  "{goods}.",
  "What assumption is hidden in this sentence: '{name} sold more {goods} this year, so the "
  "advertising in {place} worked'?",
  "In a game, {name} must cross a river with a fox, a hen and a sack of {goods}. The boat holds "
  "one thing besides {name}. How is it done?",
  "Everyone in {name}'s club plays chess or the piano. {other} does not play chess. What follows "
  "if {other} is a member, and what if not?",
  "{name} has {a} {goods}, and every day half of them (rounded down) are sold in {place}. On what "
  "day is there one left?",
)


def _numbers(rng):
  hour = rng.randint(6, 14)
  return {
    "a": rng.randint(11, 60), "b": rng.randint(3, 48), "c": 12 * rng.randint(8, 70),
    "s": rng.randint(2, 9), "t": rng.randint(3, 9), "t1": rng.randint(1, 6),
    "x": rng.randint(10, 25), "y": rng.randint(26, 70), "p": 5 * rng.randint(1, 12), "h": hour,
    "h2": hour + rng.randint(1, 6), "speed": 10 * rng.randint(4, 16),
    "hundreds": 100 * rng.randint(20, 90)}


def _people_and_things(rng):
  first, second, third = rng.sample(NAMES, 3)
  place, place2 = rng.sample(PLACES, 2)
  goods, goods2, goods3 = rng.sample(_GOODS, 3)
  return {"name": first, "other": second, "third": third, "place": place, "place2": place2,
          "goods": goods, "g1": goods, "g2": goods2, "g3": goods3, "shop": pick(rng, _SHOPS)}


def make_arithmetic(rng):
  """Draws one word problem or exercise: (text, key, follow_up or None)."""
  follow_up = pick(rng, (None,) * 9 + (
    "Now double every number and solve it again.", "Can you check that another way?"))
  if rng.random() < 0.68:
    template = pick(rng, _PROBLEMS)
    values = _numbers(rng) | _people_and_things(rng)
    text = template.format(**values) + pick(rng, _ENDINGS)
    return text, None, follow_up
  text = pick(rng, _EXERCISES).format(**_numbers(rng))
  lead = pick(rng, _EXERCISE_LEADS)
  # The numbers are the only content here, so the key keeps them.
  return lead + text, text, follow_up


def make_reasoning(rng):
  """Draws one small logic or argument puzzle: (text, key, follow_up or None)."""
  values = _numbers(rng) | _people_and_things(rng)
  text = pick(rng, _PUZZLES).format(**values) + pick(rng, _ENDINGS[:4])
  return text, None, pick(rng, (None,) * 7 + ("How sure are you, and why?",))
