"""The wording of the questions that `ruler` asks, so that scores can be compared with those of others.

RULER's are quoted from github.com/NVIDIA/RULER (`scripts/data/synthetic/constants.py` and `niah.py`, Copyright (c) 2024 NVIDIA
CORPORATION, Apache License 2.0), spaces at their ends left out; that of `key_value` from
github.com/nelson-liu/lost-in-the-middle (MIT License). A pair is a question and what the answer begins with. The wording of
`graphwalks` and of the questions about passages is ours.
"""

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {values} for {key} is: {value}."

#: Where one value is asked for, and where several are.
NIAH_ONE = (
    "A special magic {value} is hidden within the following text. Make sure to memorize it. I will quiz you about the {value} "
    "afterwards.\n{context}\nWhat is the special magic {value} for {query} mentioned in the provided text?",
    " The special magic {value} for {query} mentioned in the provided text is",
)
NIAH = (
    "Some special magic {value}s are hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "{value}s afterwards.\n{context}\nWhat are all the special magic {value}s for {query} mentioned in the provided text?",
    " The special magic {value}s for {query} mentioned in the provided text are",
)
VT = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\nQuestion: Find all "
    "variables that are assigned the value {query} in the text above.",
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned the value "
    "{query}, they are:",
)
CWE = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that appear "
    "most often.\n{context}\nQuestion: What are the 10 most common words in the above list?",
    " Answer: The top 10 words that appear most often in the list are:",
)
FWE = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared coded "
    "words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most "
    "frequently appeared words in the above coded text?",
    " Answer: According to the coded text above, the three most frequently appeared words are:",
)
_QA = "Answer the question based on the given documents. Only give me the answer and do not output any other words."
QA = (
    f"{_QA}\n\nThe following are given documents.\n\n{{context}}\n\n{_QA}\n\nQuestion: {{query}}",
    " Answer:",
)
GAP = 'Which word is left out at the gap in "{before} ____ {after}"?'
GAP_AND_NEXT = GAP + " That word stands in one other document, too: which word comes right after it there?"

KEY_VALUE = (
    "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n{context}\n\n"
    'Key: "{query}"',
    "\nCorresponding value:",
)
GRAPHWALKS = (
    "A graph is given below by its directed edges, one a line. A breadth-first search of depth {depth} from a node finds "
    "those nodes whose shortest way from it has exactly {depth} edges. Answer with a list of nodes, as [abcdef, fedcba].\n\n"
    "Edges:\n{context}\n\nWhich nodes does a breadth-first search of depth {depth} from the node {query} find?",
    "\nFinal Answer: [",
)
