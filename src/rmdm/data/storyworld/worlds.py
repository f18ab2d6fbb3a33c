"""The three worlds: their plots, words and sentences. FROZEN: an edit changes `fingerprint` and needs a new VERSION.

`tense` is declared last in every plot, see `grammar.py` for the notation.
"""

from collections.abc import Mapping

from rmdm.data.storyworld.grammar import Shape, Slot, Words, World


def _even(values: str) -> dict[str, int]:
    return dict.fromkeys(values.split(), 1)


def _gendered(women: str, men: str, she: str, he: str) -> Mapping[str, str]:
    return dict.fromkeys(women.split(), she) | dict.fromkeys(men.split(), he)


def _pronouns(women: str, men: str) -> dict[str, Words]:
    """Words `he`, `his` and `him` that follow the hero."""
    table = {"he": ("she", "he"), "his": ("her", "his"), "him": ("her", "him")}
    return {name: Words("hero", _gendered(women, men, *words), "pronoun") for name, words in table.items()}


_TENSE = {"past": 2, "present": 1}

TINY = World(
    length=11,
    variables={
        "hero": _even("mia anna tom ben"),
        "thing": {"ball": 3, "kite": 2, "drum": 1},
        "mood": _even("happy sad"),
        "tense": _TENSE,
    },
    words={
        **_pronouns("mia anna", "tom ben"),
        "happily": Words("mood", {"happy": "happily", "sad": "sadly"}),
        "smiled": Words("mood", {"happy": "smiled/smiles", "sad": "cried/cries"}),
    },
    slots=(
        Slot(
            "opening",
            (
                Shape(2, "{hero} [ {happily} ] found/finds a {thing} ."),
                # "found a" has two derivations on purpose: likelihoods must sum over them.
                Shape(1, "{hero} found/finds|saw/sees the|a {thing} ."),
            ),
        ),
        Slot(
            "ending",
            (
                Shape(2, "{he} {smiled} ."),
                Shape(1, "{hero} was/is {mood} ."),
                Shape(1, "the {thing} broke/breaks .", ("sad",)),
                Shape(1, "{he} kept/keeps it .", ("happy",)),
            ),
            given="mood",
        ),
    ),
)

MINI = World(
    length=32,
    variables={
        "hero": _even("mia anna lily nora tom ben jack leo"),
        "pet": _even("dog cat duck pony"),
        "place": _even("beach forest farm park river garden"),
        "thing": _even("kite ball key coin hat book ring bell"),
        "weather": _even("sunny rainy windy snowy"),
        "mood": _even("happy sad sleepy"),
        "tense": _TENSE,
    },
    words={
        **_pronouns("mia anna lily nora", "tom ben jack leo"),
        "barked": Words(
            "pet",
            {"dog": "barked/barks", "cat": "purred/purrs", "duck": "quacked/quacks", "pony": "neighed/neighs"},
        ),
        "sand": Words(
            "place",
            {
                "beach": "sand",
                "forest": "moss",
                "farm": "hay",
                "park": "grass",
                "river": "mud",
                "garden": "flowers",
            },
        ),
        "rain": Words("weather", {"sunny": "sun", "rainy": "rain", "windy": "wind", "snowy": "snow"}),
        "happily": Words("mood", {"happy": "happily", "sad": "sadly", "sleepy": "sleepily"}),
        "smiled": Words(
            "mood",
            {
                "happy": "smiled/smiles|laughed/laughs",
                "sad": "cried/cries|sighed/sighs",
                "sleepy": "yawned/yawns|stretched/stretches",
            },
        ),
    },
    slots=(
        Slot(
            "opening",
            (
                Shape(
                    3, "one {weather} morning|evening {hero} {happily} walked/walks to the {place} with {his} {pet} ."
                ),
                Shape(3, "{hero} {happily} took/takes {his} {pet} to the {place} one {weather} morning|evening ."),
                Shape(2, "{hero} was/is {mood} near the {place} with {his} {pet} one {weather} day ."),
                Shape(2, "{hero} {happily} followed/follows {his} {pet} to the {place} [ in the {rain} ] ."),
            ),
        ),
        Slot(
            "middle",
            (
                Shape(3, "{he} found/finds|saw/sees a small|shiny|lost {thing} in|under the {sand} ."),
                Shape(2, "in|under the {sand} {he} found/finds|saw/sees a small|shiny|lost {thing} ."),
                Shape(1, "there was/is a small|shiny|lost {thing} in|under the {sand} ."),
            ),
        ),
        Slot(
            "ending",
            (
                Shape(2, "the {pet} {barked} and {hero} {smiled} ."),
                Shape(2, "{hero} {smiled} in the {rain} with the {thing} ."),
                Shape(2, "{hero} took/takes the {thing} home and {smiled} .", ("happy", "sleepy")),
                Shape(2, "{hero} {smiled} and gave/gives the {thing} away .", ("happy",)),
                Shape(3, "the {pet} hid/hides|dropped/drops the {thing} and {hero} {smiled} .", ("sad",)),
                Shape(2, "{hero} {smiled} near|beside the {pet} and the {thing} .", ("sleepy",)),
            ),
            given="mood",
        ),
    ),
)

_WOMEN, _MEN = "clara emma julia nina sofia vera", "adam daniel felix hugo oscar simon"

FULL = World(
    length=70,
    variables={
        "hero": _even(f"{_WOMEN} {_MEN}"),
        "friend": _even("tom max amy zoe frank george helen ruth"),
        "place": _even("beach forest farm market river castle garden harbor"),
        "weather": _even("sunny rainy windy snowy foggy"),
        "hour": _even("morning afternoon evening"),
        "mood": _even("happy sad nervous sleepy"),
        "order": {"view-first": 3, "meeting-first": 2},
        "animal": _even("dog cat horse duck goat crow"),
        "thing": _even("kite key lantern scarf book flute bell map ring drum"),
        "colour": _even("red blue green yellow silver"),
        "tense": _TENSE,
    },
    words={
        **_pronouns(_WOMEN, _MEN),
        "kin": Words(
            "friend",
            {
                "tom": "brother",
                "max": "brother",
                "amy": "sister",
                "zoe": "sister",
                "frank": "uncle",
                "george": "uncle",
                "helen": "aunt",
                "ruth": "aunt",
            },
            "kin",
        ),
        "waves": Words(
            "place",
            {
                "beach": "waves|shells",
                "forest": "oaks|pines",
                "farm": "barns|fields",
                "market": "stalls|crowds",
                "river": "rapids|bridges",
                "castle": "towers|walls",
                "garden": "roses|tulips",
                "harbor": "ships|docks",
            },
        ),
        "sand": Words(
            "place",
            {
                "beach": "sand|seaweed",
                "forest": "ferns|moss",
                "farm": "hay|straw",
                "market": "baskets|crates",
                "river": "reeds|mud",
                "castle": "stones|dust",
                "garden": "soil|weeds",
                "harbor": "nets|ropes",
            },
        ),
        "rain": Words("weather", {"sunny": "sun", "rainy": "rain", "windy": "wind", "snowy": "snow", "foggy": "fog"}),
        "fell": Words(
            "weather",
            {
                "sunny": "shone/shines|glowed/glows",
                "rainy": "fell/falls|poured/pours",
                "windy": "blew/blows|howled/howls",
                "snowy": "fell/falls|swirled/swirls",
                "foggy": "drifted/drifts|thickened/thickens",
            },
        ),
        "happy": Words(
            "mood",
            {"happy": "happy|cheerful", "sad": "sad|gloomy", "nervous": "nervous|scared", "sleepy": "sleepy|tired"},
        ),
        "happily": Words(
            "mood",
            {
                "happy": "happily|cheerfully",
                "sad": "sadly|gloomily",
                "nervous": "nervously|timidly",
                "sleepy": "sleepily|wearily",
            },
        ),
        "smiled": Words(
            "mood",
            {
                "happy": "smiled/smiles|laughed/laughs",
                "sad": "cried/cries|sighed/sighs",
                "nervous": "trembled/trembles|shivered/shivers",
                "sleepy": "yawned/yawns|stretched/stretches",
            },
        ),
        "barked": Words(
            "animal",
            {
                "dog": "barked/barks|growled/growls",
                "cat": "meowed/meows|purred/purrs",
                "horse": "neighed/neighs|snorted/snorts",
                "duck": "quacked/quacks",
                "goat": "bleated/bleats",
                "crow": "cawed/caws|croaked/croaks",
            },
        ),
    },
    slots=(
        Slot(
            "opening",
            (
                Shape(
                    4,
                    "one {weather} {hour} , {hero} walked/walks|went/goes|hurried/hurries to the {place} "
                    "with {his} {kin} {friend} .",
                ),
                Shape(
                    3,
                    "{hero} and {his} {kin} {friend} walked/walk|went/go|hurried/hurry to the {place} "
                    "one {weather} {hour} .",
                ),
                Shape(
                    2, "it was/is a {weather} {hour} when {hero} and {friend} reached/reach|visited/visit the {place} ."
                ),
                Shape(3, "{hero} spent/spends a {weather} {hour} near|by the {place} with {his} {kin} {friend} ."),
                Shape(1, "{hero} and {friend} were/are near|by the {place} one {weather} {hour} ."),
            ),
        ),
        Slot(
            "feeling",
            (
                Shape(3, "the {rain} {fell} and {he} felt/feels [ very|quite ] {happy} ."),
                Shape(4, "{he} felt/feels {happy} [ because the {rain} {fell} ] ."),
                Shape(2, "{he} stood/stands|waited/waits {happily} in the {rain} all {hour} ."),
                Shape(2, "{he} was/is {happy} all {hour} in the {rain} ."),
                Shape(2, "that {hour} the {rain} {fell} and {he} {smiled} ."),
                Shape(1, "{he} felt/feels [ very|quite ] {happy} all {hour} ."),
            ),
        ),
        *(
            Slot(
                name,
                (
                    Shape(2, "{friend} pointed/points at the {waves} and told/tells jokes|stories|riddles .", (view,)),
                    Shape(
                        4, "they watched/watch the {waves} [ and shared/share some bread|cheese|soup|tea ] .", (view,)
                    ),
                    Shape(2, "near the {waves} , {friend} sang/sings|hummed/hums a song|tune .", (view,)),
                    Shape(
                        2, "the {waves} looked/look|seemed/seem lovely|grand|strange to {hero} and {friend} .", (view,)
                    ),
                    Shape(2, "{friend} admired/admires the {waves} for a while .", (view,)),
                    Shape(1, "they watched/watch the {waves} together|quietly .", (view,)),
                    Shape(
                        2, "a little|friendly|hungry {animal} followed/follows them along the path|road .", (meeting,)
                    ),
                    Shape(
                        2,
                        "they met/meet|noticed/notice a little|friendly|hungry {animal} near the {waves} .",
                        (meeting,),
                    ),
                    Shape(2, "a little|friendly|hungry {animal} {barked} at {hero} and {friend} .", (meeting,)),
                    Shape(
                        2, "{friend} fed/feeds a little|friendly|hungry {animal} some bread|cheese|fruit .", (meeting,)
                    ),
                    Shape(1, "a little|friendly|hungry {animal} {barked} at them .", (meeting,)),
                ),
                given="order",
            )
            for name, view, meeting in (
                ("third sentence", "view-first", "meeting-first"),
                ("fourth sentence", "meeting-first", "view-first"),
            )
        ),
        Slot(
            "find",
            (
                Shape(3, "{hero} found/finds|spotted/spots a {colour} {thing} in|under the {sand} ."),
                Shape(3, "in|under the {sand} {he} found/finds|spotted/spots a {colour} {thing} ."),
                Shape(2, "{friend} saw/sees a {colour} {thing} in|under the {sand} ."),
                Shape(1, "suddenly|soon {he} found/finds|spotted/spots a {colour} {thing} ."),
            ),
        ),
        Slot(
            "surprise",
            (
                Shape(2, "the {animal} {barked} and nudged/nudges|touched/touches the {thing} ."),
                Shape(2, "the {animal} ran/runs|danced/dances around {him} and {barked} ."),
                Shape(2, "{he} showed/shows the {thing} to the {animal} ."),
                Shape(2, "{he} held/holds it and the {animal} {barked} ."),
                Shape(1, "the {animal} {barked} loudly|softly|twice ."),
            ),
        ),
        Slot(
            "ending",
            (
                Shape(2, "in the end {hero} kept/keeps the {colour} {thing} and {smiled} ."),
                Shape(1, "with the {colour} {thing} in {his} bag|hands , {hero} {smiled} ."),
                Shape(2, "{hero} gave/gives {friend} the {colour} {thing} and {smiled} .", ("happy", "sleepy")),
                Shape(2, "{hero} {smiled} and carried/carries the {colour} {thing} home .", ("happy",)),
                Shape(2, "{hero} {smiled} and gave/gives the {colour} {thing} to a child|neighbor .", ("happy",)),
                Shape(3, "{hero} lost/loses the {colour} {thing} again and {smiled} .", ("sad",)),
                Shape(2, "but the {colour} {thing} broke/breaks|vanished/vanishes and {hero} {smiled} .", ("sad",)),
                Shape(3, "{hero} hid/hides the {colour} {thing} in {his} bag|coat and {smiled} .", ("nervous",)),
                Shape(2, "{hero} {smiled} and left/leaves the {colour} {thing} with {friend} .", ("nervous", "sad")),
                Shape(3, "{hero} {smiled} and slept/sleeps beside the {colour} {thing} .", ("sleepy",)),
            ),
            given="mood",
        ),
    ),
)

WORLDS = {"tiny": TINY, "mini": MINI, "full": FULL}
