"""The words that tasks are made of. Everyday words, most of them one token; no word is in two lists."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ADJECTIVES = _words(
    """
    amber ancient bitter brave bright broken calm careful cheap clean clever cold crooked curious dark deep distant dusty
    early eager empty faint famous fast fresh gentle golden grand green hollow honest huge humble icy idle jolly keen kind
    large lazy little lonely loud lucky mellow modern narrow neat noble odd old pale patient plain polite proud quick quiet
    rare rough round royal rusty scarlet secret sharp shy silent silver simple sleepy slow smooth soft solid steady still
    strange strong sudden sunny sweet tall thin tidy tiny tired tough vast violet warm weary white wild wise wooden young
    """
)
ANIMALS = _words(
    """
    badger bear beaver bison camel cat crab crane crow deer dog dolphin donkey dove duck eagle falcon fish fox frog goat
    goose hare hawk heron horse lamb lion lizard lynx mole moose mouse otter owl ox panda pigeon pony rabbit raven robin
    salmon seal shark sheep snail snake sparrow spider squid swan tiger toad trout turtle whale wolf worm zebra
    """
)
THINGS = _words(
    """
    anchor apple apron arrow ball banner barrel basket bell bench blanket boat book bottle bowl box bread brick bridge
    broom brush bucket button candle canvas carpet cart chain chair cheese chest clock cloth coat coin cord crown cup
    curtain desk dish door drum engine feather fence flag flower flute fork garden gate glass glove hammer harp hat helmet
    hook horn jar kettle key knife ladder lamp lantern leaf lemon letter lock map mask mirror nail needle net oven paddle
    page paint paper pen pencil piano pillow pipe plate pocket pot ribbon ring rope saddle sail salt scarf shelf shield
    ship shoe shovel soap spoon stamp statue stone stool stove table tent thread ticket towel tower tray trunk umbrella
    vase violin wagon wallet watch wheel whistle window wire
    """
)
TRADES = _words(
    "baker barber carpenter clerk cook doctor driver farmer gardener judge miller miner nurse painter pilot plumber "
    "porter potter printer sailor singer smith tailor teacher weaver"
)
PLACES = _words(
    "barn chapel corner courtyard field forest fountain harbour hill inn lake library market meadow mill orchard pier "
    "quarry river school square stable station theatre valley village well yard"
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
DEEDS = (
    "bought a {thing} from the {other}",
    "carried a {thing} to the {place}",
    "forgot the {thing} at the {place}",
    "talked with the {other} about the {place}",
    "mended a {thing} near the {place}",
    "lent the {other} a {adjective} {thing}",
    "waited for the {other} behind the {place}",
    "counted every {thing} in the {place}",
    "saw a {adjective} {animal} by the {place}",
    "told the {other} about a {adjective} {animal}",
)
"""What happens in the chronicle that answers are hidden in."""
