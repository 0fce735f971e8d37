"""Nouns that names in needles are made of. None begins or ends another, so that no name holds another one."""

_WORDS = """
acorn airport almond anchor antler apricot apron abacus atlas avenue badger bakery balcony bamboo banjo barley
barrel basket beacon beaver beetle bicycle biscuit blanket blossom bonfire bottle boulder bracelet branch bridge
bronze bucket buffalo butter cabbage cabin cactus camel candle canyon caravan carpet castle cathedral cavern cedar
cellar chapel cherry chimney circus clarinet cloud clover cobalt coconut compass copper coral cottage cradle crane
crystal cushion cypress daisy desert diamond dolphin donkey dragon drawer eagle easel elbow ember engine envelope
fabric falcon feather ferry fiddle flannel flute forest fossil fountain fox galaxy garlic gazelle geyser ginger
giraffe glacier goblet granite grape gravel guitar hamlet hammer harbour harvest hazel helmet heron hollow honey
hornet iceberg igloo indigo island ivory jacket jaguar jasmine jewel jungle kettle kitchen kitten ladder lagoon
lantern leather lemon leopard library lilac lizard lobster locket lotus magnet mango mantle maple marble meadow
melon mirror mitten monsoon mosaic mountain muffin mushroom napkin nectar needle nickel nutmeg oasis obelisk ocean
olive onyx orbit orchid otter oyster paddle palace panther parcel parrot pasture peach pebble pelican pepper piano
pigeon pillow pocket pony prairie puddle pumpkin puzzle quarry quartz quilt rabbit raccoon radish raven reef ribbon
river robin rocket saddle saffron salmon sapphire satchel scarf shadow shovel shuttle silver sparrow spider spruce
squirrel statue stream sugar sunset tablet tangerine teapot temple thicket thimble thunder tiger timber tomato
tractor trumpet tulip tunnel turtle umbrella valley vanilla velvet village vineyard violin volcano wagon walnut
walrus whistle willow window winter wizard yogurt zebra zephyr
"""
WORDS = tuple(_WORDS.split())
