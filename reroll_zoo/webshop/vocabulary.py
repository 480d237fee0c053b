"""The words that the synthetic shop is made of: departments, their categories, attributes, options and prices."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionGroup:
    """A choice on the item page, e.g. the colour. A product offers a few of the values, in this order."""

    name: str
    values: tuple[str, ...]
    priced: bool = False
    """Whether later values cost more, as larger sizes do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Department:
    """A part of the shop whose products share attributes and options."""

    name: str
    categories: dict[str, tuple[int, int]]
    """What is sold, in the plural or as a mass noun, with the range of its base price in dollars."""
    attributes: tuple[str, ...]
    """Adjectives: they stand before a category's name or after it."""
    options: tuple[OptionGroup, ...]
    uses: tuple[str, ...]
    """What a description says the product is good for."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(","))


COLOR = OptionGroup(
    name="color",
    values=_words(
        "black, white, red, navy blue, sky blue, olive green, mint, yellow, orange, purple, pink, brown, grey, beige"
    ),
)
CLOTHING_SIZE = OptionGroup(name="size", values=_words("x-small, small, medium, large, x-large, xx-large"), priced=True)
SHOE_SIZE = OptionGroup(name="size", values=_words("6, 7, 8, 9, 10, 11, 12, 13"))
VOLUME = OptionGroup(name="volume", values=_words("30 ml, 50 ml, 100 ml, 200 ml, 400 ml"), priced=True)
SCENT = OptionGroup(
    name="scent", values=_words("lavender, rose, citrus, vanilla, sandalwood, jasmine, eucalyptus, coconut, green apple")
)
FLAVOR = OptionGroup(
    name="flavor",
    values=_words("sea salt, dark cherry, caramel, honey, lemon, ginger, cinnamon, chili lime, peach, hazelnut, blueberry"),
)
QUANTITY = OptionGroup(name="quantity", values=_words("pack of 1, pack of 2, pack of 3, pack of 6, pack of 12"), priced=True)
MATERIAL = OptionGroup(name="material", values=_words("oak, walnut, bamboo, steel, glass, rattan, marble"))
DIMENSION = OptionGroup(name="size", values=_words("compact, standard, wide, extra wide"), priced=True)
CAPACITY = OptionGroup(name="capacity", values=_words("32 GB, 64 GB, 128 GB, 256 GB, 512 GB"), priced=True)
LENGTH = OptionGroup(name="length", values=_words("0.5 m, 1 m, 2 m, 3 m, 5 m"), priced=True)
PATTERN = OptionGroup(name="pattern", values=_words("plain, striped, floral, plaid, polka dot, camouflage"))
LEVEL = OptionGroup(name="level", values=_words("beginner, intermediate, advanced, expert"))
PET_SIZE = OptionGroup(name="size", values=_words("tiny, small, medium, large, giant"), priced=True)
PAPER = OptionGroup(name="format", values=_words("A3, A4, A5, A6, letter, legal"))

DEPARTMENTS = (
    Department(
        name="clothing",
        categories={
            "rain jackets": (30, 140),
            "hooded sweatshirts": (18, 80),
            "cargo trousers": (20, 90),
            "summer dresses": (20, 110),
            "polo shirts": (12, 60),
            "wool socks": (6, 28),
        },
        attributes=_words(
            "machine washable, slim fit, loose fit, long sleeved, quick drying, water resistant, fleece lined, wrinkle"
            " free, organic, stretchy, breathable, hand made, high waisted, windproof, odor resistant, tagless"
        ),
        options=(COLOR, CLOTHING_SIZE, PATTERN),
        uses=("the office", "long walks", "cold mornings", "a weekend away", "everyday wear"),
    ),
    Department(
        name="footwear",
        categories={
            "running shoes": (35, 160),
            "hiking boots": (50, 220),
            "leather sandals": (20, 90),
            "canvas sneakers": (20, 85),
            "house slippers": (10, 45),
            "ankle boots": (40, 180),
        },
        attributes=_words(
            "waterproof, lightweight, non slip, memory foam, arch supporting, steel toed, vegan, shock absorbing, wide"
            " fit, ultra soft, anti bacterial, insulated, open toed, reflective, low heeled, lace free"
        ),
        options=(COLOR, SHOE_SIZE),
        uses=("muddy trails", "city streets", "long shifts", "the gym", "the beach"),
    ),
    Department(
        name="beauty",
        categories={
            "body lotion": (6, 40),
            "hair shampoo": (5, 35),
            "face serum": (12, 95),
            "shower gel": (4, 25),
            "hand cream": (4, 24),
            "perfume oil": (15, 120),
        },
        attributes=_words(
            "cruelty free, paraben free, sulfate free, non greasy, dermatologist tested, oil free, plant based,"
            " hydrating, anti aging, long lasting, alcohol free, hypoallergenic, fast absorbing, tear free, silicone"
            " free, travel friendly"
        ),
        options=(SCENT, VOLUME, QUANTITY),
        uses=("dry skin", "sensitive skin", "daily care", "a gift", "frequent travel"),
    ),
    Department(
        name="grocery",
        categories={
            "green tea": (5, 30),
            "ground coffee": (7, 38),
            "protein bars": (8, 42),
            "trail mix": (6, 32),
            "potato chips": (3, 22),
            "dark chocolate": (4, 36),
        },
        attributes=_words(
            "gluten free, sugar free, dairy free, non gmo, keto friendly, low sodium, high protein, fair trade,"
            " kosher, caffeine free, soy free, nut free, freeze dried, artisan made, fat free, preservative free"
        ),
        options=(FLAVOR, QUANTITY),
        uses=("school lunches", "the office drawer", "a long hike", "quiet evenings", "sharing"),
    ),
    Department(
        name="furniture",
        categories={
            "office chairs": (70, 420),
            "coffee tables": (60, 380),
            "book shelves": (45, 300),
            "bed frames": (110, 700),
            "bar stools": (40, 210),
            "shoe racks": (20, 120),
        },
        attributes=_words(
            "easy to assemble, space saving, height adjustable, heavy duty, mid century, scratch resistant, foldable,"
            " stackable, fully assembled, tufted, rustic, rust proof, pet friendly, wall mounted, rolling, stain"
            " resistant"
        ),
        options=(COLOR, MATERIAL, DIMENSION),
        uses=("small flats", "the living room", "a home office", "guest rooms", "the hallway"),
    ),
    Department(
        name="electronics",
        categories={
            "digital tablets": (90, 650),
            "music players": (30, 240),
            "memory sticks": (8, 70),
            "dash cameras": (40, 260),
            "game handhelds": (60, 420),
            "voice recorders": (25, 180),
        },
        attributes=_words(
            "wireless, fast charging, high resolution, noise cancelling, dust proof, voice controlled, energy saving,"
            " shatter proof, plug and play, long range, ultra thin, touch sensitive, hands free, solar powered,"
            " refurbished, splash proof"
        ),
        options=(COLOR, CAPACITY),
        uses=("commuting", "road trips", "video calls", "students", "outdoor work"),
    ),
    Department(
        name="accessories",
        categories={
            "charging cables": (5, 40),
            "network cables": (5, 50),
            "extension cords": (8, 60),
            "light strips": (10, 75),
            "audio cables": (6, 55),
            "dog leashes": (6, 40),
        },
        attributes=_words(
            "braided, tangle free, gold plated, flame retardant, heavy gauge, high speed, flexible, weather resistant,"
            " shielded, right angled, detachable, retractable, double sided, magnetic, child safe, low profile"
        ),
        options=(COLOR, LENGTH, QUANTITY),
        uses=("the desk", "the workshop", "the garden", "the car", "a busy home"),
    ),
    Department(
        name="hobbies",
        categories={
            "jigsaw puzzles": (8, 55),
            "model kits": (12, 140),
            "board games": (14, 90),
            "paint sets": (9, 85),
            "embroidery kits": (8, 50),
            "chess sets": (15, 150),
        },
        attributes=_words(
            "hand painted, educational, family friendly, limited edition, glow in the dark, wooden, non toxic,"
            " portable, battery free, collectible, washable, cooperative, oversized, eco friendly, award winning,"
            " screen free"
        ),
        options=(LEVEL, COLOR, QUANTITY),
        uses=("rainy days", "birthdays", "quiet concentration", "classrooms", "game nights"),
    ),
    Department(
        name="pets",
        categories={
            "dog beds": (18, 130),
            "cat collars": (4, 28),
            "pet carriers": (20, 120),
            "dog harnesses": (10, 60),
            "cat scratchers": (12, 90),
            "pet sweaters": (8, 45),
        },
        attributes=_words(
            "chew proof, orthopedic, self warming, removable, adjustable, escape proof, padded, airline approved,"
            " cooling, anti anxiety, odor proof, ventilated, double stitched, noise free, raised, leak proof"
        ),
        options=(COLOR, PET_SIZE, PATTERN),
        uses=("older animals", "car journeys", "nervous pets", "playful puppies", "winter walks"),
    ),
    Department(
        name="stationery",
        categories={
            "paper notebooks": (3, 30),
            "weekly planners": (6, 40),
            "sketch books": (5, 45),
            "index cards": (2, 18),
            "document folders": (3, 26),
            "photo albums": (9, 70),
        },
        attributes=_words(
            "recycled, acid free, spiral bound, hard covered, dotted, ruled, bleed proof, perforated, refillable,"
            " pocketed, leather bound, color coded, undated, tear resistant, archival, thread bound"
        ),
        options=(PAPER, COLOR, QUANTITY),
        uses=("lecture notes", "daily planning", "ink and pencil", "the filing cabinet", "memories"),
    ),
)

BRANDS = _words(
    "Norvale, Tessen, Arbolet, Quillon, Marrow & Pine, Oskari, Vantelle, Brightmoor, Kestrey, Lumeo, Halvard,"
    " Pellucia, Dunmere, Sorrelby, Ferrant, Ivorine, Calder Row, Mistwell, Ostrander, Zephyrine, Tamsin,"
    " Wrenfield, Corvane, Eldmoor, Parsley Lane, Rookwood, Saltmarsh, Thistledown, Umberly, Yarrowe, Brindle,"
    " Cobalt Bay, Fennick, Glasswing, Heronsgate, Juniper Hall"
)
