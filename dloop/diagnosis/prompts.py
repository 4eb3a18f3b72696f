"""The prompts that a diagnosis has answered: short tasks of the kinds that chat models are asked."""

PROMPTS = (
    "Write a Python function that checks whether a word is a palindrome.",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "List five fruits that are rich in vitamin C, with one sentence about each.",
    "A shop sells pens at 3 for 2 euros. How much do 21 pens cost? Think step by step.",
    "Explain in simple words why the sky is blue.",
    "Write a polite e-mail that asks a colleague to move a meeting to Thursday.",
    "Write an SQL query that gives the ten customers with the highest total of orders.",
    "What are the advantages and disadvantages of working from home?",
    "Describe how to make a cup of tea, as numbered steps.",
    "Who was Marie Curie, and what is she known for?",
    "Write a poem of eight lines about autumn.",
    "Plan two days in Rome for a family with small children.",
    "What is the difference between a list and a tuple in Python? Give an example of each.",
    "Summarise the story of Romeo and Juliet in a few sentences.",
    "Give me tips for learning a new language quickly.",
    "A train leaves at 9:40 and travels 150 km at 60 km/h. When does it arrive? Show the calculation.",
)
