"""Programming prompts: Python stubs with computed examples, requests, reviews, SQL and shell."""

from dspark_jax.data.prompt_functions import FUNCTIONS
from dspark_jax.data.prompt_slots import fill, pick

# Pipelines over a list of integers: keep some, change each, reduce. The examples in the docstrings
# are computed by running the pipeline, so a stub never shows a wrong answer.
_KEEP = (
  ("even", "the even numbers", lambda v: v % 2 == 0),
  ("odd", "the odd numbers", lambda v: v % 2 == 1),
  ("positive", "the numbers greater than zero", lambda v: v > 0),
  ("negative", "the numbers below zero", lambda v: v < 0),
  ("triple", "the multiples of three", lambda v: v % 3 == 0),
  ("five", "the multiples of five", lambda v: v % 5 == 0),
  ("two_digit", "the numbers with exactly two digits", lambda v: 10 <= abs(v) <= 99),
  ("small", "the numbers whose absolute value is below ten", lambda v: abs(v) < 10),
  ("square", "the perfect squares", lambda v: v >= 0 and int(v ** 0.5) ** 2 == v),
  ("prime", "the prime numbers", lambda v: v > 1 and all(v % d for d in range(2, v))),
  ("ends_in_one", "the numbers whose last digit is 1", lambda v: abs(v) % 10 == 1),
  ("all", "all numbers", lambda v: True),
)
_CHANGE = (
  ("", "", lambda v: v),
  ("squared", " after squaring each one", lambda v: v * v),
  ("doubled", " after doubling each one", lambda v: 2 * v),
  ("negated", " after flipping the sign of each one", lambda v: -v),
  ("cubed", " after raising each one to the third power", lambda v: v ** 3),
  ("plus_one", " after adding one to each", lambda v: v + 1),
  ("absolute", " using absolute values", abs),
  ("digit_summed", " after replacing each by the sum of its digits",
   lambda v: sum(int(c) for c in str(abs(v)))),
)
_REDUCE = (
  ("sum_of", "int", "the sum of", sum),
  ("count_of", "int", "the number of elements among", len),
  ("largest_of", "int", "the largest (0 when there is none) of", lambda r: max(r, default=0)),
  ("smallest_of", "int", "the smallest (0 when there is none) of", lambda r: min(r, default=0)),
  ("sorted_list_of", "list[int]", "a sorted list of", sorted),
  ("distinct_list_of", "list[int]", "a list, without repeats and in first-seen order, of",
   lambda r: list(dict.fromkeys(r))),
  ("running_sums_of", "list[int]", "the list of running sums over",
   lambda r: [sum(r[:i + 1]) for i in range(len(r))]),
  ("range_of", "int",
   "the difference between the largest and the smallest (0 if fewer than two) of",
   lambda r: max(r) - min(r) if len(r) > 1 else 0),
  ("reversed_list_of", "list[int]", "a list in reverse order of", lambda r: r[::-1]),
  ("has_any_of", "bool", "whether the list has at least one among", lambda r: bool(r)),
  ("product_of", "int", "the product (1 when there is none) of", lambda r: _product(r)),
)

_WORDS = ("apple", "river", "Level", "noon", "stone", "Kayak", "bridge", "Zebra", "echo",
          "umbrella",
          "radar", "tree", "Ocean", "lamp", "igloo", "moss", "Civic", "thunder", "ant", "queue")
_WORD_KEEP = (
  ("vowel_start", "the words that start with a vowel", lambda w: w[0].lower() in "aeiou"),
  ("palindrome", "the words that read the same backwards, ignoring case",
   lambda w: w.lower() == w.lower()[::-1]),
  ("long", "the words of more than five letters", lambda w: len(w) > 5),
  ("short", "the words of at most four letters", lambda w: len(w) <= 4),
  ("capitalised", "the words that begin with a capital letter", lambda w: w[0].isupper()),
  ("double_letter", "the words with two equal letters in a row",
   lambda w: any(a == b for a, b in zip(w, w[1:]))),
  ("even_length", "the words with an even number of letters", lambda w: len(w) % 2 == 0),
  ("unique_letter", "the words in which no letter occurs twice",
   lambda w: len(set(w.lower())) == len(w)),
  ("e_ending", "the words that end in the letter e", lambda w: w[-1].lower() == "e"),
)
_WORD_CHANGE = (
  ("", "", lambda w: w),
  ("upper", " in upper case", str.upper),
  ("reversed", " with their letters reversed", lambda w: w[::-1]),
  ("lower", " in lower case", str.lower),
  ("first_letter", " cut down to their first letter", lambda w: w[0]),
  ("consonant", " with all vowels taken out",
   lambda w: "".join(c for c in w if c.lower() not in "aeiou")),
)
_WORD_REDUCE = (
  ("join", "str", "one string, joined by a dash, of", "-".join),
  ("list", "list[str]", "a list, in the given order, of", list),
  ("sort", "list[str]", "an alphabetical list of", sorted),
  ("count", "int", "the number of", len),
  ("longest", "str", "the longest (an empty string if there is none) of",
   lambda r: max(r, key=len, default="")),
  ("total_length", "int", "the total length of", lambda r: sum(map(len, r))),
  ("lengths", "dict[str, int]", "a dictionary from each word to its length, for",
   lambda r: {w: len(w) for w in r}),
)

_NUMBER_ARGS = ("numbers", "values", "nums", "xs", "items", "data", "readings", "scores")
_STUB_LEADS = (
  "Complete this Python function so that its examples hold.",
  "Finish the function below. Return only the code.",
  "Here is a Python stub. Write the body and explain it in two sentences.",
  "Implement the function described by the docstring:",
  "Fill in the missing body of this function, then add one more example.",
  "Please solve this small task; the examples in the docstring must come out right.",
  "Write the function whose signature and docstring are given here.",
  "The following function has no body yet. Provide one that passes the doctests.",
)
_REQUEST_LEADS = (
  "Write a Python function `{name}` that returns {what}.",
  "In Python, how would I write a function called {name} that gives back {what}?",
  "I need a short Python function {name}({arg}) which returns {what}. Include a test.",
  "Write a JavaScript function that returns {what}. Add a comment to each step.",
  "Show me two ways in Python to compute {what}, and say which one is faster.",
  "Write a Go function that returns {what}, with a small table of test cases.",
  "Write pytest tests for a function `{name}` that should return {what}.",
  "Write a Rust function returning {what}. Explain how ownership matters here.",
)

_TASKS = (
  "reads a text file and prints the {n} most common words", "merges two sorted lists into one",
  "checks whether brackets in a string are balanced", "rotates a list to the right by {n} places",
  "converts a Roman numeral into an integer", "splits a list into chunks of {n} elements",
  "computes the moving average of a list with a window of {n}",
  "finds the longest common prefix of a list of strings", "flattens a nested list",
  "counts the islands in a grid of zeros and ones", "converts Celsius to Fahrenheit and back",
  "generates the first {n} rows of Pascal's triangle", "encodes a string by run lengths",
  "retries a failing call up to {n} times with a growing pause", "validates an email address",
  "transposes a matrix given as a list of lists", "caches results for {n} seconds",
  "finds all pairs in a list that add up to {n}", "implements a stack with a minimum operation",
  "parses a line of comma-separated values with quoted fields", "draws a simple bar chart in text",
  "walks a directory tree and sums file sizes by extension", "checks a Sudoku row for repeats",
  "turns snake_case names into camelCase", "computes the edit distance of two words",
  "does a binary search and returns the insertion point", "simulates {n} rolls of two dice",
  "formats a duration in seconds as hours, minutes and seconds", "shuffles a deck of cards",
  "finds the shortest path in an unweighted graph", "groups a list of dictionaries by one key",
  "computes the greatest common divisor of a list of integers", "reverses a linked list in place",
  "keeps the top {n} scores in a heap", "converts an integer to base {n}",
  "downloads a page and lists its links", "checks if two strings are anagrams",
  "prints a calendar for a given month", "computes compound interest over {n} years",
  "evaluates an expression in reverse Polish notation", "implements a least-recently-used cache",
)
_LANGUAGES = ("Python", "JavaScript", "Java", "C", "Go", "Rust", "C++", "TypeScript", "Ruby",
              "Bash")
_TASK_LEADS = (
  "Write a {language} program that {task}.",
  "Write a {language} function that {task}. Handle empty input.",
  "Can you give me {language} code that {task}? Please comment it for a beginner.",
  "I am learning {language}. Show me step by step how to write code that {task}.",
  "Implement something in {language} that {task}, then discuss its running time.",
  "What is the cleanest way in {language} to write code that {task}?",
)

# Each snippet has one real defect, named in the second entry for the reader of this file.
_BUGGY = (
  ("def mean({a}):\n    total = 0\n    for v in {a}:\n        total += v\n    "
   "return total / len({a})",
   "empty list"),
  ("def last({a}):\n    return {a}[len({a})]", "index past the end"),
  ("def add_item(item, {a}=[]):\n    {a}.append(item)\n    return {a}", "mutable default"),
  ("def drop_zeros({a}):\n    for v in {a}:\n        if v == 0:\n            {a}.remove(v)\n"
   "    return {a}",
   "changes the list while walking it"),
  ("def is_even(n):\n    if n % 2 = 0:\n        return True\n    return False",
   "assignment in test"),
  ("def count_up(n):\n    i = 0\n    while i < n:\n        print(i)", "endless loop"),
  ("def biggest({a}):\n    best = 0\n    for v in {a}:\n        if v > best:\n            "
   "best = v\n    return best",
   "all negative"),
  ("def factorial(n):\n    return n * factorial(n - 1)", "no base case"),
  ("def greet(name):\n    print('Hello, ' + name + 1)", "adds int to str"),
  ("def read_total(path):\n    f = open(path)\n    return sum(int(line) for line in f.read())",
   "walks characters, never closes"),
  ("def middle({a}):\n    {a}.sort()\n    return {a}[len({a}) / 2]", "float index"),
  ("def same(p, q):\n    return p is q\n\nprint(same(1000, 10 ** 3))", "identity, not equality"),
  ("def invert(d):\n    return {{v: k for k in d.items()}}", "tuple not unpacked"),
  ("def squares(n):\n    return [i ^ 2 for i in range(n)]", "xor, not power"),
)
_BUG_LEADS = (
  "This code does not do what I expect. What is wrong with it?\n\n```python\n{code}\n```",
  "Find the bug and show a corrected version:\n```python\n{code}\n```",
  "Review the following function as if you were a senior {job}.\n\n```python\n{code}\n```",
  "Explain line by line what this does, and when it fails:\n\n```python\n{code}\n```",
  "My colleague, a {job}, wrote this. Rewrite it more clearly and add type hints.\n"
  "```python\n{code}\n```",
  "Write {n} unit tests that would reveal problems in this code:\n```python\n{code}\n```",
)
_JOBS = ("engineer", "teacher", "data analyst", "tester", "site reliability engineer", "student")

_TABLES = (
  ("orders", "customer_id, total, created_at"), ("employees", "name, department, salary, hired_on"),
  ("books", "title, author, year, price"), ("visits", "user_id, page, seconds, visited_at"),
  ("flights", "origin, destination, departs_at, delay_minutes"), ("pupils", "name, class, score"),
  ("products", "sku, category, price, stock"), ("songs", "title, artist, length_seconds, plays"),
  ("sensors", "device, measured_at, temperature"),
  ("tickets", "agent, status, opened_at, closed_at"),
)
_SQL_LEADS = (
  "Given a table {table}({columns}), write an SQL query that lists the top {n} rows by {column}.",
  "Table: {table}({columns}). Write SQL to count the rows for each {column}, most frequent first.",
  "How do I delete duplicate rows from {table}({columns}) in SQL, keeping the newest?",
  "Write the CREATE TABLE statement for {table}({columns}) with sensible types and one index on "
  "{column}.",
  "Explain what a window function is, with an example that ranks rows of {table}({columns}) by "
  "{column}.",
  "Write an SQL query on {table}({columns}) for rows whose {column} is above the average.",
  "My query on {table}({columns}) filtered by {column} is slow. Give {n} things to check.",
)
_SHELL = (
  "Write a bash one-liner that finds files larger than {n} MB under the current folder.",
  "Write a shell script that renames all .{ext} files in a folder so that they start with today's "
  "date.",
  "How do I count the lines of all .{ext} files in a directory tree from the command line?",
  "Explain this command: find . -name '*.{ext}' -mtime -{n} | xargs grep -l TODO",
  "Write a bash script that keeps only the {n} newest .{ext} files in a backup folder.",
  "What does `sort | uniq -c | sort -rn | head -{n}` do, and when would I use it on .{ext} files?",
  "Write a git command sequence that moves my last {n} commits to a new branch, and explain each "
  "step.",
  "Give me a Makefile with targets build, test and clean for a project of .{ext} files.",
)
_EXTENSIONS = ("log", "csv", "jpg", "txt", "py", "json", "md", "xml", "html", "yaml")


def _product(values):
  result = 1
  for value in values:
    result *= value
  return result


def _number_spec(rng):
  keep, change, reduce_ = pick(rng, _KEEP), pick(rng, _CHANGE), pick(rng, _REDUCE)
  if reduce_[0] in ("count_of", "has_any_of"):
    change = _CHANGE[0]  # changing the values would not change the answer
  name = "_".join(part for part in (reduce_[0], keep[0], change[0]) if part)
  what = f"{reduce_[2]} {keep[1]} in the list{change[1]}"

  def run(values):
    return reduce_[3]([change[2](v) for v in values if keep[2](v)])

  def example():
    return [rng.randint(-12, 40) for _ in range(rng.randint(3, 6))]
  return name, "list[int]", reduce_[1], what, run, example


def _word_spec(rng):
  keep, change, reduce_ = pick(rng, _WORD_KEEP), pick(rng, _WORD_CHANGE), pick(rng, _WORD_REDUCE)
  if reduce_[0] == "count":
    change = _WORD_CHANGE[0]
  name = "_".join(part for part in (reduce_[0], keep[0], change[0], "words") if part)
  what = f"{reduce_[2]} {keep[1]} in the list{change[1] and ', taken' + change[1]}"

  def run(words):
    return reduce_[3]([change[2](w) for w in words if keep[2](w)])

  def example():
    return rng.sample(_WORDS, rng.randint(2, 5))
  return name, "list[str]", reduce_[1], what, run, example


def _render_pipeline_stub(rng, spec):
  name, arg_type, return_type, what, run, example = spec
  arg = pick(rng, _NUMBER_ARGS if arg_type == "list[int]" else ("words", "tokens", "names",
                                                             "terms"))
  return _render_stub(rng, name, f"{arg}: {arg_type}", return_type, f"Return {what}.",
                      run, lambda _: (example(),))


def _render_stub(rng, name, parameters, return_type, doc, run, draw_args):
  lines = [f"def {name}({parameters}) -> {return_type}:", f'    """{doc}', ""]
  for _ in range(rng.randint(1, 3)):
    args = draw_args(rng)
    lines += [f"    >>> {name}({', '.join(map(repr, args))})", f"    {run(*args)!r}"]
  return "\n".join(lines + ['    """'])


def make_code(rng):
  """Draws one programming prompt: (text, key, follow_up or None)."""
  kind = rng.random()
  if kind < 0.20:
    function = pick(rng, FUNCTIONS)
    return _lead_stub(rng, _render_stub(rng, *function)), function[0], _code_follow_up(rng)
  if kind < 0.50:
    spec = _number_spec(rng) if rng.random() < 0.6 else _word_spec(rng)
    if rng.random() < 0.62:
      text = _lead_stub(rng, _render_pipeline_stub(rng, spec))
    else:
      text = pick(rng, _REQUEST_LEADS).format(name=spec[0], arg="items", what=spec[3])
    return text, spec[0], _code_follow_up(rng)
  numbers = {"n": str(rng.randint(2, 20))}
  if kind < 0.72:
    task = pick(rng, _TASKS)
    lead, language = pick(rng, _TASK_LEADS), pick(rng, _LANGUAGES)
    text = lead.format(language=language, task=task.format(**numbers))
    return text, f"{task} {language}", _code_follow_up(rng)
  if kind < 0.82:
    code = pick(rng, _BUGGY)[0].format(a=pick(rng, _NUMBER_ARGS))
    text = pick(rng, _BUG_LEADS).format(code=code, job=pick(rng, _JOBS), **numbers)
    return text, None, _code_follow_up(rng)
  if kind < 0.92:
    table, columns = pick(rng, _TABLES)
    text = pick(rng, _SQL_LEADS).format(
      table=table, columns=columns, column=pick(rng, columns.split(", ")), **numbers)
    return text, None, None
  return fill(rng, pick(rng, _SHELL), {"n": (numbers["n"],), "ext": _EXTENSIONS}), None, None


def _lead_stub(rng, stub):
  lead = pick(rng, _STUB_LEADS)
  return pick(rng, (f"{lead}\n```python\n{stub}\n```", f"{lead}\n\n{stub}\n", f"{stub}\n"))


def _code_follow_up(rng):
  if rng.random() > 0.15:
    return None
  return pick(rng, (
    "Now add error handling.", "What is the time complexity?", "Rewrite it without a loop.",
    "Can you make it shorter?", "Add type hints and a docstring.", "Now write two tests for it.",
    "How would this look in another language of your choice?",
    "What would you change for huge inputs?"))
