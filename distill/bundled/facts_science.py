"""Elements, animals, the body, inventions and ideas: one line for each, fields apart by |."""

# name | symbol | atomic number | kind | known use
ELEMENTS = """
hydrogen|H|1|colourless gas|fuel cells and the making of ammonia
helium|He|2|noble gas|balloons and cooling of magnets
lithium|Li|3|soft metal|batteries
carbon|C|6|non-metal|steel, fuels and pencils
nitrogen|N|7|colourless gas|fertilisers
oxygen|O|8|colourless gas|breathing and burning
fluorine|F|9|pale yellow gas|toothpaste and coatings
neon|Ne|10|noble gas|glowing signs
sodium|Na|11|soft metal|table salt and street lamps
magnesium|Mg|12|light metal|light alloys and flares
aluminium|Al|13|light metal|cans, foil and aircraft
silicon|Si|14|semiconductor|computer chips and glass
phosphorus|P|15|non-metal|matches and fertilisers
sulfur|S|16|yellow non-metal|sulfuric acid and rubber
chlorine|Cl|17|greenish gas|cleaning drinking water
argon|Ar|18|noble gas|welding and light bulbs
potassium|K|19|soft metal|fertilisers
calcium|Ca|20|metal|cement and bones
titanium|Ti|22|strong light metal|aircraft and implants
chromium|Cr|24|hard metal|stainless steel
iron|Fe|26|metal|steel
cobalt|Co|27|metal|batteries and blue glass
nickel|Ni|28|metal|coins and alloys
copper|Cu|29|reddish metal|wires and pipes
zinc|Zn|30|metal|protecting steel from rust
arsenic|As|33|poisonous semi-metal|semiconductors
silver|Ag|47|precious metal|jewellery and mirrors
tin|Sn|50|soft metal|solder and cans
iodine|I|53|dark solid|disinfection
tungsten|W|74|very hard metal|filaments of light bulbs
platinum|Pt|78|precious metal|catalysts and jewellery
gold|Au|79|precious metal|jewellery and electronics
mercury|Hg|80|liquid metal|old thermometers
lead|Pb|82|heavy metal|car batteries
radium|Ra|88|radioactive metal|early glowing paint
uranium|U|92|radioactive metal|nuclear power
"""
# name | group | where it lives | what it eats
ANIMALS = """
blue whale|mammal|all oceans|krill
African elephant|mammal|the savannas and forests of Africa|grass, leaves and bark
giraffe|mammal|the savannas of Africa|leaves
lion|mammal|Africa and a part of India|antelopes and zebras
tiger|mammal|Asia|deer and wild pigs
cheetah|mammal|Africa|gazelles
polar bear|mammal|the Arctic|seals
giant panda|mammal|the mountains of China|bamboo
koala|mammal|eastern Australia|eucalyptus leaves
kangaroo|mammal|Australia|grass
platypus|mammal|the rivers of eastern Australia|worms, insects and shrimps
sloth|mammal|the rainforests of Central and South America|leaves
bat|mammal|nearly everywhere on land|insects or fruit
dolphin|mammal|oceans and some rivers|fish and squid
wolf|mammal|the forests and plains of the north|deer and smaller animals
red fox|mammal|the northern half of the world|mice, birds and berries
hedgehog|mammal|Europe, Asia and Africa|insects and snails
beaver|mammal|rivers of North America and Europe|bark and plants
camel|mammal|the deserts of Asia and Africa|dry plants
hippopotamus|mammal|the rivers of Africa|grass
gorilla|mammal|the forests of central Africa|leaves and fruit
orangutan|mammal|Borneo and Sumatra|fruit
squirrel|mammal|forests and parks|nuts and seeds
emperor penguin|bird|Antarctica|fish and krill
ostrich|bird|Africa|plants and insects
bald eagle|bird|North America|fish
barn owl|bird|every continent but Antarctica|mice
hummingbird|bird|the Americas|nectar
flamingo|bird|shallow lakes of warm countries|shrimps and algae
peacock|bird|India and Sri Lanka|seeds and insects
albatross|bird|the southern oceans|fish and squid
kiwi|bird|New Zealand|worms and insects
woodpecker|bird|forests|insects in wood
Nile crocodile|reptile|the rivers of Africa|fish and mammals
Komodo dragon|reptile|a few islands of Indonesia|deer and carrion
sea turtle|reptile|warm oceans|sea grass and jellyfish
chameleon|reptile|Madagascar and Africa|insects
king cobra|reptile|South and Southeast Asia|other snakes
giant tortoise|reptile|the Galapagos Islands and Aldabra|grass and cactus
poison dart frog|amphibian|the rainforests of South America|ants
axolotl|amphibian|lakes near Mexico City|worms and small fish
salamander|amphibian|moist forests|insects and worms
great white shark|fish|cool coastal oceans|seals and fish
clownfish|fish|coral reefs|algae and small animals
salmon|fish|oceans and rivers of the north|insects and smaller fish
seahorse|fish|shallow warm seas|tiny shrimps
honey bee|insect|nearly every continent|nectar and pollen
monarch butterfly|insect|North America|milkweed and nectar
ant|insect|nearly all land|almost anything
dragonfly|insect|near ponds and streams|mosquitoes
ladybird|insect|gardens and fields|aphids
mosquito|insect|near still water|nectar and blood
octopus|mollusc|all oceans|crabs and clams
giant squid|mollusc|the deep sea|fish
snail|mollusc|gardens, woods and water|plants
tarantula|arachnid|warm regions|insects
scorpion|arachnid|deserts and forests|insects and spiders
lobster|crustacean|the sea floor|fish and mussels
jellyfish|cnidarian|all oceans|plankton
starfish|echinoderm|the sea floor|mussels
"""
BODY = """
heart|lungs|liver|kidneys|brain|stomach|small intestine|large intestine|pancreas|spleen|gallbladder|bladder|skin
thyroid gland|appendix|diaphragm|spinal cord|retina|cornea|inner ear|cerebellum|hippocampus|bone marrow
white blood cells|red blood cells|platelets|tendons|ligaments|cartilage|femur|aorta|trachea|vocal cords|adrenal glands
pituitary gland|lymph nodes|sweat glands|taste buds|eardrum|nervous system|immune system|rib cage|achilles tendon
esophagus
"""
# what | who | when
INVENTIONS = """
telephone|Alexander Graham Bell|1876
printing press|Johannes Gutenberg|about 1440
phonograph|Thomas Edison|1877
dynamite|Alfred Nobel|1867
radio|Guglielmo Marconi|the 1890s
World Wide Web|Tim Berners-Lee|1989
first vaccine|Edward Jenner|1796
penicillin|Alexander Fleming|1928
telegraph|Samuel Morse|the 1830s
diesel engine|Rudolf Diesel|the 1890s
first powered airplane|the Wright brothers|1903
hot air balloon|the Montgolfier brothers|1783
braille|Louis Braille|1824
periodic table|Dmitri Mendeleev|1869
x-ray|Wilhelm Roentgen|1895
pasteurization|Louis Pasteur|the 1860s
lightning rod|Benjamin Franklin|1752
cotton gin|Eli Whitney|1793
assembly line for cars|Henry Ford|1913
polio vaccine|Jonas Salk|the 1950s
transistor|John Bardeen, Walter Brattain and William Shockley|1947
jet engine|Frank Whittle|the 1930s
television|John Logie Baird|1926
ballpoint pen|Laszlo Biro|the 1930s
zipper|Gideon Sundback|1913
microwave oven|Percy Spencer|1945
barometer|Evangelista Torricelli|1643
battery|Alessandro Volta|1800
steam locomotive|Richard Trevithick|1804
safety elevator|Elisha Otis|1852
sewing machine|Elias Howe|1846
difference engine|Charles Babbage|1822
analytic geometry|Rene Descartes|1637
theory of relativity|Albert Einstein|1905
law of gravity|Isaac Newton|1687
theory of evolution|Charles Darwin|1859
structure of DNA|James Watson and Francis Crick|1953
radium|Marie Curie|1898
circulation of the blood|William Harvey|1628
laws of planetary motion|Johannes Kepler|the early 1600s
"""
IDEAS = """
photosynthesis|gravity|evolution by natural selection|plate tectonics|the water cycle|the greenhouse effect|osmosis
mitosis|inflation|supply and demand|opportunity cost|gross domestic product|compound interest|a recession
the stock market|a mortgage|democracy|the separation of powers|federalism|the rule of law|judicial review
a constitution|human rights|the Cold War|machine learning|a neural network|an operating system|a database index
recursion|public key encryption|a firewall|cloud computing|a black hole|a supernova|a light year|the Big Bang
dark matter|an eclipse|a comet|the northern lights|a tsunami|an earthquake|a hurricane|a tornado|a volcano|a glacier
acid rain|the ozone layer|biodiversity|an ecosystem|a food chain|symbiosis|pollination|the immune response|a vaccine
an antibiotic|a virus|DNA replication|a gene mutation|an enzyme|cellular respiration|homeostasis|a metaphor|a sonnet
irony|a haiku|the Renaissance|impressionism|baroque music|jazz|surrealism|romanticism|a fable|an allegory
the placebo effect|cognitive dissonance|confirmation bias|classical conditioning|short-term memory
the scientific method|a hypothesis|friction|kinetic energy|momentum|electric current|a magnetic field
static electricity|refraction|sound waves|entropy|radioactivity|an acid|a catalyst|a covalent bond|an ion|the pH scale
combustion|distillation|crystallisation|corrosion|fermentation|a prime number|the Pythagorean theorem|probability
standard deviation|a logarithm|pi|a derivative|a matrix|an algorithm|binary code|the Industrial Revolution|feudalism
colonialism|the Silk Road|the Magna Carta|the Enlightenment|globalisation|urbanisation|mindfulness|a balanced diet
cholesterol|insulin|blood pressure|metabolism|dehydration|REM sleep|stress|allergies|a fever|renewable energy
nuclear fission|nuclear fusion|solar panels|wind turbines|carbon dioxide|recycling|composting|desalination|time zones
leap years|daylight saving time|latitude and longitude|the equator|tides|the seasons|the phases of the moon|monsoons
"""
PAIRS = """
weather and climate|a virus and a bacterium|speed and velocity|mass and weight|an atom and a molecule
an element and a compound|mitosis and meiosis|arteries and veins|a simile and a metaphor|fiction and non-fiction
a lake and a sea|a crocodile and an alligator|a frog and a toad|a butterfly and a moth|a comet and an asteroid
a meteor and a meteorite|stalactites and stalagmites|jam and jelly|debit and credit cards|stocks and bonds
gross and net income|a republic and a monarchy|socialism and capitalism|the House and the Senate
RAM and hard disk storage|HTTP and HTTPS|a compiler and an interpreter|a list and a tuple in Python|TCP and UDP
hardware and software|renewable and non-renewable energy|AC and DC current|conduction and convection
series and parallel circuits|heat and temperature|affect and effect|its and it's|who and whom|a colon and a semicolon
active and passive voice|a noun and a pronoun|mean and median|type 1 and type 2 diabetes|a cold and the flu
aerobic and anaerobic exercise|saturated and unsaturated fats|vitamins and minerals|England and Great Britain
a cyclone and a typhoon|longitude and latitude|fog and mist|igneous and sedimentary rock|coal and charcoal
a violin and a viola|a symphony and a concerto|ballet and modern dance|a novel and a short story
a biography and an autobiography|baking soda and baking powder|broth and stock|espresso and drip coffee
cumin and coriander|yams and sweet potatoes|macarons and macaroons
"""
