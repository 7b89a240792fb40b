"""Words of the generated databases: tables, columns, their everyday synonyms, and value pools.

A question seldom repeats a column's name: it says "how tall" or "size". `VAGUE` words fit several columns of one
table; `schemas.Schema.resolve` fixes which column is meant most of the time, and that share is what leaves a model
something to decide.
"""

from __future__ import annotations

# table -> (plural words a question may use)
TABLES: dict[str, tuple[str, ...]] = {
    "singer": ("singers", "vocalists", "recording artists"),
    "club": ("clubs", "societies", "associations"),
    "student": ("students", "pupils", "learners"),
    "school": ("schools", "academies", "places of education"),
    "employee": ("employees", "workers", "staff members"),
    "company": ("companies", "firms", "businesses"),
    "hotel": ("hotels", "inns", "places to stay"),
    "resort": ("resorts", "holiday parks", "vacation spots"),
    "car": ("cars", "vehicles", "automobiles"),
    "maker": ("makers", "manufacturers", "producers"),
    "book": ("books", "titles", "volumes"),
    "author": ("authors", "writers", "novelists"),
    "player": ("players", "athletes", "sportspeople"),
    "team": ("teams", "squads", "sides"),
    "doctor": ("doctors", "physicians", "medics"),
    "hospital": ("hospitals", "clinics", "medical centres"),
    "ship": ("ships", "vessels", "boats"),
    "harbor": ("harbors", "ports", "docks"),
    "museum": ("museums", "galleries", "collections"),
    "painting": ("paintings", "artworks", "pictures"),
    "flight": ("flights", "air trips", "plane journeys"),
    "airport": ("airports", "airfields", "air terminals"),
    "farm": ("farms", "ranches", "farmsteads"),
    "river": ("rivers", "streams", "waterways"),
    "bridge": ("bridges", "crossings", "viaducts"),
    "product": ("products", "goods", "items"),
    "store": ("stores", "shops", "outlets"),
    "dog": ("dogs", "hounds", "canines"),
    "owner": ("owners", "holders", "proprietors"),
    "course": ("courses", "classes", "modules"),
    "teacher": ("teachers", "instructors", "tutors"),
    "film": ("films", "movies", "motion pictures"),
    "director": ("directors", "film makers", "movie directors"),
    "festival": ("festivals", "fairs", "public feasts"),
    "theater": ("theaters", "playhouses", "stages"),
    "mountain": ("mountains", "peaks", "summits"),
}

# (child, parent, words joining them): each child row points at one parent row
RELATIONS: tuple[tuple[str, str], ...] = (
    ("singer", "club"), ("singer", "festival"), ("student", "school"), ("student", "club"), ("employee", "company"),
    ("employee", "store"), ("employee", "hospital"), ("hotel", "resort"), ("hotel", "company"), ("car", "maker"),
    ("car", "owner"), ("book", "author"), ("book", "store"), ("player", "team"), ("player", "club"),
    ("doctor", "hospital"), ("doctor", "school"), ("ship", "harbor"), ("ship", "company"), ("painting", "museum"),
    ("painting", "owner"), ("flight", "airport"), ("flight", "company"), ("farm", "owner"), ("farm", "river"),
    ("bridge", "river"), ("product", "store"), ("product", "maker"), ("dog", "owner"), ("dog", "farm"),
    ("course", "teacher"), ("course", "school"), ("film", "director"), ("film", "festival"), ("film", "theater"),
    ("theater", "company"), ("team", "school"), ("store", "company"), ("teacher", "school"), ("hotel", "mountain"),
    ("resort", "mountain"), ("museum", "festival"), ("harbor", "river"), ("festival", "theater"),
)  # fmt: skip

# numeric column -> (low, high, vague group, synonyms, superlative words for most / least)
NUMBERS: dict[str, tuple[int, int, str, tuple[str, ...], tuple[str, str]]] = {
    "age": (18, 80, "time", ("age", "years of age", "age in years"), ("oldest", "youngest")),
    "founded": (1850, 2015, "time", ("founding year", "year of foundation", "start year"), ("newest", "oldest")),
    "opened": (1900, 2020, "time", ("opening year", "year of opening", "first year open"), ("newest", "oldest")),
    "year": (1960, 2022, "time", ("year", "date", "year of record"), ("latest", "earliest")),
    "height": (20, 400, "size", ("height", "tallness", "vertical extent"), ("tallest", "shortest")),
    "length": (20, 900, "size", ("length", "extent from end to end", "span"), ("longest", "shortest")),
    "weight": (5, 500, "size", ("weight", "mass", "heaviness"), ("heaviest", "lightest")),
    "area": (30, 990, "size", ("area", "surface", "ground covered"), ("largest", "smallest")),
    "capacity": (50, 950, "size", ("capacity", "room for people", "number of places"), ("roomiest", "least roomy")),
    "salary": (20, 99, "money", ("salary", "pay", "wage"), ("best paid", "worst paid")),
    "price": (5, 95, "money", ("price", "cost", "asking price"), ("most expensive", "cheapest")),
    "budget": (10, 900, "money", ("budget", "planned spending", "funds"), ("best funded", "worst funded")),
    "revenue": (15, 990, "money", ("revenue", "income", "earnings"), ("highest earning", "lowest earning")),
    "sales": (10, 800, "money", ("sales", "units sold", "turnover"), ("best selling", "worst selling")),
    "score": (1, 100, "standing", ("score", "mark", "result"), ("highest scoring", "lowest scoring")),
    "rating": (1, 60, "standing", ("rating", "review grade", "stars"), ("best rated", "worst rated")),
    "points": (1, 90, "standing", ("points", "tally", "point total"), ("top scoring", "bottom scoring")),
    "rank": (1, 40, "standing", ("rank", "place in the ranking", "ranking"), ("highest ranked", "lowest ranked")),
    "wins": (1, 50, "standing", ("wins", "victories", "times won"), ("most winning", "least winning")),
}

# vague word group -> words that fit every column of the group
VAGUE: dict[str, tuple[str, ...]] = {
    "time": ("time", "dating"),
    "size": ("size", "dimension"),
    "money": ("money", "amount of money"),
    "standing": ("standing", "performance"),
    "place": ("place", "location"),
    "class": ("class", "sort"),
}
VAGUE_EXTREMES: dict[str, tuple[str, str]] = {
    "time": ("most recent", "least recent"),
    "size": ("biggest", "littlest"),
    "money": ("richest", "poorest"),
    "standing": ("best", "worst"),
}

_CITIES = ("Oslo", "Lima", "Cairo", "Paris", "Delhi", "Quito", "Turin", "Leeds", "Basel", "Porto", "Kyoto", "Miami",
           "Dublin", "Prague", "Austin", "Sydney")  # fmt: skip
_COUNTRIES = ("Norway", "Peru", "Egypt", "France", "India", "Ecuador", "Italy", "Spain", "Japan", "Canada", "Brazil",
              "Kenya", "Poland", "Chile")  # fmt: skip

# text column -> (values, vague group, synonyms)
LABELS: dict[str, tuple[tuple[str, ...], str, tuple[str, ...]]] = {
    "city": (_CITIES, "place", ("city", "town", "home town")),
    "country": (_COUNTRIES, "place", ("country", "nation", "land")),
    "region": (("North", "South", "East", "West", "Coast", "Valley"), "place", ("region", "district", "area of land")),
    "street": (("Main", "High", "Park", "Mill", "Church", "Station"), "place", ("street", "road", "address")),
    "type": (("small", "public", "private", "mixed", "open"), "class", ("type", "kind", "category")),
    "level": (("junior", "senior", "expert", "basic"), "class", ("level", "grade", "tier")),
    "status": (("active", "closed", "pending", "retired"), "class", ("status", "state", "condition")),
    "color": (("red", "blue", "green", "black", "white"), "class", ("color", "shade", "hue")),
    "style": (("modern", "classic", "rustic", "plain"), "class", ("style", "manner", "look")),
}

_STARTS = ("Al", "Be", "Ca", "Da", "El", "Fi", "Ga", "Ha", "In", "Jo", "Ka", "Lu", "Mi", "No", "Or", "Pe", "Ra", "So",
           "Ta", "Vi")  # fmt: skip
_ENDS = ("na", "ron", "lia", "mo", "ter", "vin", "dra", "sel", "ko", "bert", "nis", "ga")
NAMES: tuple[str, ...] = tuple(a + b for a in _STARTS for b in _ENDS)
