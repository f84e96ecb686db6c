"""Shared word lists and the slot filler of the built-in prompts."""

import re

_SLOT = re.compile(r"\{(\w+)\}")


def pick(rng, options):
  """One of `options`, uniformly, by a `random.Random`."""
  return options[rng.randrange(len(options))]


def fill(rng, template, slots):
  """Replaces each `{name}` in the template by a draw from `slots[name]`; each occurrence anew."""
  return _SLOT.sub(lambda match: pick(rng, slots[match.group(1)]), template)


NAMES = (
  "Amara", "Ben", "Chiara", "Dmitri", "Elif", "Farid", "Grace", "Hiro", "Ines", "Jonas", "Kavya",
  "Liam", "Mei", "Noor", "Oscar", "Priya", "Quentin", "Rosa", "Samuel", "Tariq", "Uma", "Viktor",
  "Wanda", "Ximena", "Yusuf", "Zoe", "Astrid", "Bruno", "Celeste", "Dario")

PLACES = (
  "Lisbon", "Kyoto", "Marrakesh", "Reykjavik", "Oaxaca", "Edinburgh", "Hanoi", "Cape Town",
  "Vancouver", "Istanbul", "Krakow", "Seville", "Cusco", "Tallinn", "Singapore", "Naples",
  "Melbourne", "Zanzibar", "Quebec City", "Jaipur", "Porto", "Buenos Aires", "Copenhagen", "Petra",
  "Ljubljana", "Havana", "Queenstown", "Athens", "Seoul", "Bologna")

FIELDS = {
  "science": (
    "photosynthesis", "plate tectonics", "the water cycle", "black holes", "natural selection",
    "vaccines", "radioactive decay", "tides", "the greenhouse effect", "superconductors", "enzymes",
    "the Doppler effect", "rainbows", "DNA replication", "antibiotic resistance", "entropy",
    "gravity", "how birds navigate", "lightning", "the periodic table", "coral bleaching",
    "nuclear fusion", "symbiosis", "the ozone layer", "volcanoes", "stem cells", "osmosis",
    "the speed of light", "dark matter", "fermentation", "magnetism", "the seasons", "crystals",
    "why the sky is blue", "evolution of whales", "the nitrogen cycle", "buoyancy", "catalysts"),
  "technology": (
    "how a hard disk stores data", "public-key encryption", "solar panels", "machine learning",
    "how search engines rank pages", "GPS", "3D printing", "the internet protocol", "blockchains",
    "electric motors", "recommendation systems", "lithium batteries", "compilers", "databases",
    "touch screens", "fibre-optic cables", "noise-cancelling headphones", "version control",
    "operating systems", "neural networks", "cloud computing", "wind turbines", "QR codes",
    "refrigerators", "jet engines", "microwaves", "spam filters", "data compression", "heat pumps"),
  "history": (
    "the Silk Road", "the fall of the Western Roman Empire", "the printing press",
    "the Black Death",
    "the French Revolution", "the Meiji Restoration", "the Suez Canal", "the Industrial Revolution",
    "the Library of Alexandria", "the Magna Carta", "the Berlin Wall", "the Inca road system",
    "the spread of coffee", "the abolition of slavery in Britain", "the Mongol Empire", "the Hanse",
    "the partition of India", "the Great Depression", "the Space Race", "the Ottoman Empire",
    "women's suffrage", "the Viking voyages", "the Renaissance", "ancient Carthage",
    "the Dutch tulip mania", "the Mali Empire", "the Congress of Vienna", "the Age of Sail"),
  "economics": (
    "inflation", "opportunity cost", "comparative advantage", "supply and demand", "central banks",
    "price elasticity", "game theory", "the national debt", "monopolies", "minimum wages",
    "tariffs",
    "index funds", "compound interest", "externalities", "the tragedy of the commons", "recessions",
    "exchange rates", "sunk costs", "unemployment insurance", "auctions", "microcredit", "bonds",
    "diversification", "moral hazard", "behavioural economics", "gross domestic product"),
  "health": (
    "sleep hygiene", "how vaccines train the immune system", "balanced breakfasts",
    "high blood pressure",
    "stretching before a run", "stress at work", "hydration", "type 2 diabetes", "meditation",
    "strength training for beginners", "screen time", "allergies", "back pain", "jet lag", "fibre",
    "the common cold", "vitamin D", "walking every day", "caffeine", "first aid for burns",
    "good posture", "food labels", "eye strain", "quitting smoking", "dental care"),
  "humanities": (
    "stoicism", "the trolley problem", "irony in literature", "haiku", "impressionism", "jazz",
    "Greek tragedy", "free will", "the social contract", "magical realism", "Gothic architecture",
    "the hero's journey", "utilitarianism", "opera", "calligraphy", "the origin of language",
    "existentialism", "fairy tales", "photography as art", "perspective in painting", "satire",
    "oral history", "translation", "virtue ethics", "film noir", "the sonnet", "blues music"),
  "daily life": (
    "composting", "learning to cook", "saving money", "keeping houseplants alive", "moving house",
    "learning a language", "public speaking", "sharing a flat", "bicycle maintenance", "chess",
    "adopting a dog", "home baking", "writing a diary", "job interviews", "time management",
    "gardening on a balcony", "repairing clothes", "hosting a dinner", "board games",
    "bird watching",
    "camping", "playing the guitar", "volunteering", "reading more books", "working from home"),
}
TOPICS = tuple(topic for topics in FIELDS.values() for topic in topics)
