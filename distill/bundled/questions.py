"""Ways to ask about a subject: for each kind a list of questions, each in several phrasings.

{0} is the subject, {1} and on are its other fields, {bare} is the subject without an article, {Name} has a capital.
"""

from __future__ import annotations

QUESTIONS: dict[str, tuple[tuple[str, ...], ...]] = {
    "country": (
        ("What is the capital of {0}?", "What's the capital city of {0}?", "Which city is the capital of {0}?"),
        ("Which continent is {0} in?", "Where is {0} located?", "Where on the map is {bare}?"),
        ("What currency is used in {0}?", "What money do they use in {0}?"),
        ("What language is spoken in {0}?", "What is the official language of {0}?", "What do people in {0} speak?"),
        ("How many people live in {0}?", "What is the population of {0}?"),
        ("Which countries border {0}?", "What countries share a border with {0}?"),
        ("What is {0} famous for?", "What is {0} best known for?", "Name three things that {0} is known for."),
        ("What is the climate of {0} like?", "When is the best time of the year to visit {0}?"),
        ("What are the largest cities in {0}?", "What is the biggest city in {0}?"),
        ("What does the flag of {0} look like?", "What colours are on the flag of {0}?"),
        (
            "Tell me about the history of {0}.",
            "Give a short overview of the history of {0}.",
            "When did {0} become an independent country?",
        ),
        ("What is a traditional dish from {0}?", "What do people eat in {0}?"),
    ),
    "river": (
        ("Where is the {0} river?", "Through which countries does the {0} flow?"),
        ("How long is the {0}?", "What is the length of the {0} river?"),
        ("Where does the {0} river end?", "What body of water does the {0} flow into?"),
        ("Where does the {0} begin?", "What is the source of the {0} river?"),
        ("Which cities lie on the {0}?", "Why is the {0} river important?"),
    ),
    "sight": (
        ("Where is {0}?", "Where can you find the {0}?", "In which country is the {0} located?"),
        ("How old is the {0}?", "When was the {0} built or formed?"),
        ("Why is the {0} famous?", "What is special about the {0}?"),
        ("How tall or large is the {0}?", "How big is the {0}?"),
        ("What should a visitor know about the {0}?", "Write a short description of the {0} for tourists."),
    ),
    "food": (
        ("Where does {0} come from?", "Which country invented {0}?", "What is the origin of {0}?"),
        ("How do you make {0}?", "What ingredients are in {0}?", "What is {0} made of?"),
        ("Is {0} healthy?", "What goes well with {0}?"),
        ("When was {0} first made?", "Who made the first {0}?"),
    ),
    "element": (
        ("What is the chemical symbol for {0}?", "Which symbol stands for {0} in the periodic table?"),
        ("What is the atomic number of {0}?", "How many protons does {0} have?"),
        ("What is {0} used for?", "What are the main uses of {0}?"),
        ("Who discovered {0}?", "When was {0} discovered?"),
        ("Is {0} a metal?", "What kind of element is {0}?", "At room temperature, is {0} a solid, a liquid or a gas?"),
        ("Where is {0} found in nature?", "How is {0} produced?"),
    ),
    "animal": (
        ("What does a {0} eat?", "What do {0}s eat?", "What is the diet of the {0}?"),
        ("Where do {0}s live?", "What is the habitat of the {0}?", "Where can you find a {0} in the wild?"),
        ("How long does a {0} live?", "What is the lifespan of a {0}?"),
        ("Is the {0} a {1}?", "What kind of animal is a {0}?", "Why is the {0} called a {1}?"),
        ("How big is a {0}?", "How much does a {0} weigh?"),
        ("How fast is a {0}?", "How does a {0} move?"),
        ("Is the {0} endangered?", "What are the natural enemies of the {0}?"),
        ("Give me three interesting facts about the {0}.", "What is special about the {0}?"),
    ),
    "invention": (
        ("Who invented the {0}?", "Who is credited with the {0}?", "Who came up with the {0}?"),
        ("When was the {0} invented?", "In which year did the {0} appear?"),
        ("How does the {0} work?", "Explain the {0} to a child."),
        ("Why was the {0} important?", "How did the {0} change the world?"),
        ("What came before the {0}?", "What did {1} do besides the {0}?"),
    ),
    "book": (
        ("Who wrote {0}?", "Who is the author of {0}?", "Which author wrote the book {0}?"),
        ("When was {0} published?", "What year did {0} come out?"),
        ("What is {0} about?", "Summarise the plot of {0}.", "What is the story of {0}?"),
        ("Who is the main character in {0}?", "Who are the main characters in {0}?"),
        ("Where is {0} set?", "What is the setting of {0}?"),
        ("What is the main theme of {0}?", "How does {0} end?"),
        ("What other works did {1} write?", "What kind of book is {0}?"),
    ),
    "person": (
        ("Who was {0}?", "What was {0} known for?", "Why is {0} famous?"),
        ("When was {0} born?", "In which year was {0} born?"),
        ("Where was {0} born?", "Which country did {0} come from?", "What was the nationality of {0}?"),
        ("What did {0} do?", "What was the profession of {0}?"),
        ("When did {0} die?", "How did {0} die?"),
        ("Write a short biography of {0}.", "What are the most important events in the life of {0}?"),
        ("What is the legacy of {0}?", "How did {0} influence others?"),
    ),
    "event": (
        ("When was the {0}?", "When did the {0} happen?", "In what year did the {0} take place?"),
        ("Where did the {0} take place?", "Where was the {0}?"),
        ("What caused the {0}?", "Why did the {0} happen?"),
        ("What were the results of the {0}?", "How did the {0} change history?"),
        ("Who was involved in the {0}?", "Who played a role in the {0}?"),
        ("Explain the {0} in a few sentences.", "What was the {0}?"),
    ),
    "body": (
        ("What does the {0} do?", "What is the function of the {0} in the human body?", "What is the {0} for?"),
        ("Where is the {0} located?", "Where in the body is the {0}?"),
        ("What happens when the {0} does not work properly?", "Which diseases affect the {0}?"),
        ("How does the {0} work?", "Describe the structure of the {0}."),
        ("How can you keep the {0} healthy?", "Can a person live without the {0}?"),
    ),
    "idea": (
        ("What is {0}?", "What does {0} mean?", "Define {0}."),
        ("How does {0} work?", "Explain {0} in simple terms.", "Explain {0} to a ten-year-old."),
        ("Why is {0} important?", "What is the purpose of {0}?", "Why should people know about {0}?"),
        ("Give an example of {0}.", "What are some examples of {0}?"),
        ("Who first described {0}?", "Where does the idea of {0} come from?"),
        ("What are common misunderstandings about {0}?", "Name three facts about {0}."),
    ),
    "pair": (
        ("What is the difference between {0}?", "How do {0} differ?", "What's the difference between {0}"),
        ("Compare {0}.", "What do {0} have in common?"),
        ("How can I remember the difference between {0}?", "Explain {0} with an example for each."),
    ),
    "game": (
        ("How many players are there in {0}?", "How many people are needed for {0}?"),
        ("What are the basic rules of {0}?", "How do you play {0}?", "How is the score counted in {0}?"),
        ("Where was {0} invented?", "What is the history of {0}?"),
        ("How do you win at {0}?", "How long does {0} usually take?"),
        ("What equipment do you need for {0}?", "What is the most important tournament in {0}?"),
    ),
    "howto": (
        ("How do I {0}?", "How to {0}", "What is the best way to {0}?"),
        ("Give me step-by-step instructions to {0}.", "Explain in five steps how to {0}."),
        ("What mistakes do people make when they {0}?", "What do I need to {0}?"),
    ),
    "writing": (
        ("Write {0}.", "Please write {0}.", "Can you write {0}?"),
        ("Help me with {0}.", "I need {0}. Keep it simple."),
    ),
}
