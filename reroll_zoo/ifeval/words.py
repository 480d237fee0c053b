"""The words that generated instruction tasks and their answers are made of.

The answers' sentences hold no commas, quotation marks, brackets or asterisks, none of the words that tasks may forbid or
count, and no word in capitals, so that what an instruction asks for is there only where it was put.
"""

from __future__ import annotations

TOPICS = (
    *("the sea", "old maps", "cooking at home", "long walks", "city parks", "school libraries", "wild birds", "night trains"),
    *("cold winters", "summer rain", "street music", "family dinners", "small farms", "mountain trails", "board games"),
    *("the moon", "good sleep", "home repairs", "early mornings", "tall trees", "honey bees", "fresh bread", "ocean waves"),
    *("folk songs", "local shops", "paper boats", "morning coffee", "the stars", "apple trees", "friendly dogs"),
    *("sleepy cats", "clean water", "school plays", "letter writing", "garage sales", "bus rides", "bird nests"),
    *("open fields", "hot soup", "painted walls", "hand tools", "wooden toys", "the desert", "deep forests", "snow days"),
    *("spring flowers", "team sports", "model planes", "rock climbing", "swimming lessons", "first aid", "kind neighbours"),
    *("village fairs", "stone houses", "sailing boats", "steam engines", "clay pots", "knitted hats", "road trips"),
    *("camp fires", "short poems", "ghost stories", "science fairs", "computer games", "learning to draw", "planting trees"),
    *("growing food", "saving money", "telling the truth", "waking up late", "making friends", "helping others"),
    *("riding a bike", "reading aloud", "sharing meals", "keeping a diary", "walking to school", "moving to a new town"),
    *("working in a team", "caring for a pet", "learning to swim", "watching the clouds", "listening to the radio"),
    *("waiting for the bus", "living near a lake"),
)
"""What tasks are about. Every fifth topic is held out."""

REQUESTS = (
    "Write about {topic}.",
    "Tell me about {topic}.",
    "Say something about {topic}.",
    "Describe {topic} to a friend.",
    "Write a short note about {topic}.",
    "What do you know about {topic}?",
    "Help me understand {topic}.",
    "Give a short talk about {topic}.",
    "Share a few thoughts on {topic}.",
    "Teach a child about {topic}.",
    "Why do people care about {topic}?",
    "Introduce {topic} to someone new.",
)
QUESTIONS = (
    "Should children learn about {topic}?",
    "Would you write a book about {topic}?",
    "Is it worth an hour to read about {topic}?",
    "Can everyone learn something from {topic}?",
    "Do people talk enough about {topic}?",
    "Is there much to say about {topic}?",
)
"""Requests that can be answered with yes, no or maybe."""

SENTENCES = (
    "People have cared about {topic} for a long time.",
    "Many of us first hear about {topic} at home.",
    "There is much to learn about {topic}.",
    "Some friends talk about {topic} every week.",
    "My family often reads about {topic}.",
    "You can find a book about {topic} in most towns.",
    "It takes time to understand {topic} well.",
    "Children like to ask about {topic}.",
    "Old people tell stories about {topic}.",
    "We can start with small steps when we think about {topic}.",
    "Each day brings a new idea about {topic}.",
    "Teachers use {topic} to show how the world works.",
    "Not everyone agrees about {topic}.",
    "That is why {topic} can bring people together.",
    "Most of what we say about {topic} comes from practice.",
    "Everyone can say something about {topic}.",
    "Some mornings seem made for {topic}.",
    "Two people may see {topic} in different ways.",
    "Our town has its own stories about {topic}.",
    "With a little care we can all learn from {topic}.",
    "Songs about {topic} make the work feel light.",
    "In the end {topic} will stay with us.",
)
KEYWORD_SENTENCES = (
    "The word {keyword} belongs here too.",
    "Here is {keyword} once more.",
    "Think of {keyword} for a moment.",
    "Then comes {keyword} again.",
    "Add {keyword} to the picture.",
)
PLACEHOLDER_SENTENCE = "Please fill in [{placeholder}] here."
POSTSCRIPT = "Thank you for reading this."
TITLE = "About {topic}"
OPENINGS = {
    "today": "Today we look at {topic}.",
    "here": "Here we think about {topic}.",
    "people": "People everywhere know about {topic}.",
    "most": "Most of us have seen {topic}.",
    "when": "When we are young we hear about {topic}.",
    "after": "After a while we learn more about {topic}.",
    "nobody": "Nobody knows all about {topic}.",
    "perhaps": "Perhaps you know about {topic}.",
}
"""First words of a paragraph, each with a sentence that begins so."""

KEYWORDS = (
    *("river", "garden", "window", "silver", "button", "castle", "ladder", "candle", "mirror", "pocket", "basket", "feather"),
    *(
        "thunder",
        "blanket",
        "lantern",
        "orange",
        "pencil",
        "carpet",
        "dragon",
        "island",
        "kitchen",
        "marble",
        "planet",
        "rabbit",
    ),
)
COMMON_WORDS = ("the", "and", "people", "about", "you", "with", "can", "that")
"""Words to be used seldom: answers hold them by themselves."""
FORBIDDEN = (
    *("very", "really", "important", "nice", "great", "beautiful", "interesting", "always", "never", "amazing", "because"),
    *("also", "however", "wonderful", "special", "simply", "fun", "quite"),
)
PLACEHOLDERS = ("name", "place", "date", "time", "city", "street", "phone", "email")
SPLITTERS = ("Section", "SECTION", "Part")
POSTSCRIPT_MARKERS = ("P.S.", "P.P.S")
ENDINGS = (
    "That is all for now.",
    "Is there anything else you want to know?",
    "Have a pleasant day.",
    "Let me know what you think.",
    "This is the end of my answer.",
)
COMMON_LETTERS = "etaoinshr"
SCARCE_LETTERS = "bkpvwy"
"""Letters that an answer can hold a few of."""

LANGUAGE_NAMES = {"es": "Spanish", "fr": "French", "de": "German", "it": "Italian", "pt": "Portuguese"}
FOREIGN_SENTENCES = {
    "es": (
        "Este es un tema que gusta a todos.",
        "En mi casa se habla mucho de esto.",
        "Los libros nos cuentan una parte de la historia.",
        "Para entenderlo bien hay que tener paciencia.",
        "Cada persona lo ve de una manera distinta.",
        "Los niños hacen preguntas sobre todo lo que ven.",
        "Con el tiempo se aprende más.",
        "Al final lo que queda es el recuerdo.",
    ),
    "fr": (
        "Voici un sujet que tout le monde aime.",
        "Dans ma famille on en parle très souvent.",
        "Les livres nous racontent une partie de cette histoire.",
        "Pour bien comprendre il faut du temps.",
        "Chaque personne voit les choses à sa façon.",
        "Les enfants posent des questions sur tout.",
        "Avec le temps nous apprenons plus.",
        "À la fin il reste un bon souvenir.",
    ),
    "de": (
        "Das ist ein Thema für alle Menschen.",
        "In meiner Familie sprechen wir oft über die Welt.",
        "Die Bücher erzählen uns einen Teil der Geschichte.",
        "Man muss sich Zeit nehmen und gut zuhören.",
        "Jeder Mensch sieht die Dinge auf seine Weise.",
        "Die Kinder fragen nach allem und das ist gut.",
        "Mit der Zeit lernen wir mehr.",
        "Am Ende bleibt eine schöne Erinnerung an den Tag.",
    ),
    "it": (
        "Questo è un tema che piace a tutti.",
        "Nella mia famiglia si parla spesso di queste cose.",
        "I libri ci raccontano una parte della storia.",
        "Per capire bene ci vuole molto tempo.",
        "Ogni persona vede le cose in un modo diverso.",
        "Anche i bambini fanno domande su tutto.",
        "Con il tempo si impara di più.",
        "Alla fine rimane un bel ricordo per tutti noi.",
    ),
    "pt": (
        "Este é um assunto que não cansa ninguém.",
        "Na minha família falamos muito sobre isso.",
        "Os livros contam uma parte da história.",
        "Para entender bem é preciso ter tempo.",
        "Cada pessoa vê as coisas do seu modo.",
        "As crianças fazem perguntas sobre tudo o que veem.",
        "Com o tempo nós aprendemos mais.",
        "No fim fica uma boa lembrança para todos.",
    ),
}
