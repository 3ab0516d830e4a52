"""Books, people, events, games and everyday requests: one line for each, fields apart by |."""

# title | author | year | what it is
BOOKS = """
Pride and Prejudice|Jane Austen|1813|novel of manners
Moby-Dick|Herman Melville|1851|novel about a whale hunt
Jane Eyre|Charlotte Bronte|1847|novel
Wuthering Heights|Emily Bronte|1847|novel
Great Expectations|Charles Dickens|1861|novel
Oliver Twist|Charles Dickens|1838|novel about an orphan
Frankenstein|Mary Shelley|1818|gothic novel
Dracula|Bram Stoker|1897|gothic novel
War and Peace|Leo Tolstoy|1869|historical novel
Anna Karenina|Leo Tolstoy|1878|novel
Crime and Punishment|Fyodor Dostoevsky|1866|novel
Les Miserables|Victor Hugo|1862|novel
Don Quixote|Miguel de Cervantes|1605|novel
The Divine Comedy|Dante Alighieri|about 1320|long poem
Hamlet|William Shakespeare|about 1600|tragedy
Romeo and Juliet|William Shakespeare|about 1595|tragedy
Macbeth|William Shakespeare|about 1606|tragedy
The Odyssey|Homer|about the 8th century BC|epic poem
The Iliad|Homer|about the 8th century BC|epic poem
The Canterbury Tales|Geoffrey Chaucer|about 1400|collection of stories
Paradise Lost|John Milton|1667|epic poem
Gulliver's Travels|Jonathan Swift|1726|satire
Robinson Crusoe|Daniel Defoe|1719|adventure novel
Treasure Island|Robert Louis Stevenson|1883|adventure novel
Alice's Adventures in Wonderland|Lewis Carroll|1865|children's book
Peter Pan|J. M. Barrie|1904|play
The Jungle Book|Rudyard Kipling|1894|collection of stories
The Adventures of Tom Sawyer|Mark Twain|1876|novel
Little Women|Louisa May Alcott|1868|novel
The Scarlet Letter|Nathaniel Hawthorne|1850|novel
Walden|Henry David Thoreau|1854|book of essays
The Great Gatsby|F. Scott Fitzgerald|1925|novel
To Kill a Mockingbird|Harper Lee|1960|novel
The Catcher in the Rye|J. D. Salinger|1951|novel
The Grapes of Wrath|John Steinbeck|1939|novel
Of Mice and Men|John Steinbeck|1937|short novel
The Old Man and the Sea|Ernest Hemingway|1952|short novel
1984|George Orwell|1949|dystopian novel
Animal Farm|George Orwell|1945|satire
Brave New World|Aldous Huxley|1932|dystopian novel
Fahrenheit 451|Ray Bradbury|1953|dystopian novel
Lord of the Flies|William Golding|1954|novel
The Hobbit|J. R. R. Tolkien|1937|fantasy novel
The Little Prince|Antoine de Saint-Exupery|1943|children's book
One Hundred Years of Solitude|Gabriel Garcia Marquez|1967|novel
Things Fall Apart|Chinua Achebe|1958|novel
The Metamorphosis|Franz Kafka|1915|short novel
The Stranger|Albert Camus|1942|novel
Ulysses|James Joyce|1922|novel
Mrs Dalloway|Virginia Woolf|1925|novel
The Time Machine|H. G. Wells|1895|science fiction novel
Twenty Thousand Leagues Under the Seas|Jules Verne|1870|adventure novel
The Art of War|Sun Tzu|about the 5th century BC|military treatise
The Prince|Niccolo Machiavelli|1532|political treatise
On the Origin of Species|Charles Darwin|1859|work of science
The Wealth of Nations|Adam Smith|1776|work of economics
"""
# name | born | country | field | known for
PEOPLE = """
Albert Einstein|1879|Germany|physicist|the theory of relativity
Isaac Newton|1643|England|physicist and mathematician|the laws of motion and gravity
Marie Curie|1867|Poland|physicist and chemist|the study of radioactivity
Galileo Galilei|1564|Italy|astronomer|observations with the telescope
Nicolaus Copernicus|1473|Poland|astronomer|placing the sun at the centre of the planets
Charles Darwin|1809|England|naturalist|the theory of evolution
Nikola Tesla|1856|Croatia|engineer|alternating current
Ada Lovelace|1815|England|mathematician|the first published computer program
Alan Turing|1912|England|mathematician|breaking codes and the theory of computing
Grace Hopper|1906|the United States|computer scientist|the first compilers
Rosalind Franklin|1920|England|chemist|X-ray images of DNA
Louis Pasteur|1822|France|chemist|the germ theory of disease
Florence Nightingale|1820|Italy|nurse|the reform of nursing
Leonardo da Vinci|1452|Italy|painter and inventor|the Mona Lisa
Michelangelo|1475|Italy|sculptor and painter|the ceiling of the Sistine Chapel
Vincent van Gogh|1853|the Netherlands|painter|The Starry Night
Claude Monet|1840|France|painter|impressionist paintings of water lilies
Pablo Picasso|1881|Spain|painter|Guernica and cubism
Frida Kahlo|1907|Mexico|painter|self-portraits
Rembrandt|1606|the Netherlands|painter|The Night Watch
Johann Sebastian Bach|1685|Germany|composer|the Brandenburg Concertos
Wolfgang Amadeus Mozart|1756|Austria|composer|The Magic Flute
Ludwig van Beethoven|1770|Germany|composer|the Ninth Symphony
Frederic Chopin|1810|Poland|composer|works for the piano
Antonio Vivaldi|1678|Italy|composer|The Four Seasons
Pyotr Ilyich Tchaikovsky|1840|Russia|composer|Swan Lake
William Shakespeare|1564|England|playwright|Hamlet and Romeo and Juliet
Jane Austen|1775|England|novelist|Pride and Prejudice
Charles Dickens|1812|England|novelist|A Christmas Carol
Emily Dickinson|1830|the United States|poet|short poems
Agatha Christie|1890|England|novelist|detective stories
George Washington|1732|the United States|statesman|being the first president of the United States
Abraham Lincoln|1809|the United States|statesman|ending slavery in the United States
Thomas Jefferson|1743|the United States|statesman|writing the Declaration of Independence
Benjamin Franklin|1706|the United States|statesman and inventor|experiments with electricity
Martin Luther King Jr.|1929|the United States|minister|leading the civil rights movement
Rosa Parks|1913|the United States|activist|the Montgomery bus boycott
Susan B. Anthony|1820|the United States|activist|the fight for women's right to vote
Nelson Mandela|1918|South Africa|statesman|ending apartheid
Mahatma Gandhi|1869|India|statesman|non-violent resistance
Winston Churchill|1874|England|statesman|leading Britain in the Second World War
Napoleon Bonaparte|1769|France|general and emperor|wars across Europe
Joan of Arc|about 1412|France|soldier|the siege of Orleans
Queen Victoria|1819|England|monarch|a reign of 63 years
Catherine the Great|1729|Germany|monarch|ruling Russia
Marco Polo|1254|Italy|traveller|a journey to China
Christopher Columbus|1451|Italy|navigator|the voyage of 1492
Ferdinand Magellan|1480|Portugal|navigator|the first voyage around the world
Amelia Earhart|1897|the United States|pilot|flying alone across the Atlantic
Neil Armstrong|1930|the United States|astronaut|the first step on the moon
Yuri Gagarin|1934|Russia|cosmonaut|the first flight into space
Socrates|about 470 BC|Greece|philosopher|teaching by questions
Aristotle|384 BC|Greece|philosopher|works on logic and nature
Confucius|551 BC|China|philosopher|teachings on conduct
Immanuel Kant|1724|Germany|philosopher|the Critique of Pure Reason
Sigmund Freud|1856|Austria|physician|psychoanalysis
Alexander the Great|356 BC|Macedonia|king|conquering Persia
Cleopatra|69 BC|Egypt|queen|being the last queen of Egypt
"""
# what | when | where
EVENTS = """
French Revolution|1789|France
American Civil War|1861 to 1865|the United States
First World War|1914 to 1918|Europe
Second World War|1939 to 1945|Europe, Asia and Africa
fall of the Berlin Wall|1989|Germany
moon landing|1969|the moon
sinking of the Titanic|1912|the North Atlantic
Boston Tea Party|1773|Boston
signing of the Magna Carta|1215|England
Battle of Hastings|1066|England
Battle of Waterloo|1815|what is now Belgium
Battle of Gettysburg|1863|Pennsylvania
Black Death|the 14th century|Europe
Great Fire of London|1666|London
California Gold Rush|1848|California
Russian Revolution|1917|Russia
Great Depression|the 1930s|most of the world
Cuban Missile Crisis|1962|Cuba
Chernobyl disaster|1986|Ukraine
first modern Olympic Games|1896|Athens
eruption of Vesuvius|AD 79|Pompeii
fall of Constantinople|1453|what is now Istanbul
voyage of Columbus to America|1492|the Caribbean
Declaration of Independence|1776|Philadelphia
Louisiana Purchase|1803|North America
abolition of slavery in the United States|1865|the United States
attack on Pearl Harbor|1941|Hawaii
D-Day landings|1944|Normandy
Vietnam War|1955 to 1975|Vietnam
Korean War|1950 to 1953|Korea
Meiji Restoration|1868|Japan
Spanish Civil War|1936 to 1939|Spain
Irish potato famine|the 1840s|Ireland
San Francisco earthquake|1906|San Francisco
Wall Street Crash|1929|New York
partition of India|1947|India and Pakistan
unification of Germany|1871|Germany
Protestant Reformation|the 16th century|Europe
Salem witch trials|1692|Massachusetts
Apollo 13 mission|1970|space
"""
GAMES = """
basketball|soccer|tennis|golf|chess|ice hockey|baseball|cricket|rugby|volleyball|badminton|table tennis|handball
water polo|curling|bowling|darts|snooker|fencing|judo|boxing|rowing|the marathon|the decathlon|the high jump|checkers
backgammon|poker|dominoes|go
"""
HOWTO = """
change a flat tire|boil an egg|write a cover letter|remove a coffee stain|tie a tie|plant tomatoes
start a compost heap|learn a new language|prepare for a job interview|save money on groceries|fall asleep faster
improve my handwriting|bake bread|fix a leaking tap|clean a cast iron pan|write a thank-you note|train a puppy
back up a computer|choose a strong password|make iced coffee|grow herbs indoors|give a good presentation
study for an exam|reduce stress at work|paint a room|pack for a trip|read a map|calculate a tip|sharpen a knife
iron a shirt|make pancakes|water a cactus|organise a bookshelf|plan a birthday party|ask for a raise|write a haiku
set up a budget|stop hiccups|remove a splinter|store fresh bread|peel garlic quickly|jump-start a car
read a nutrition label|get rid of fruit flies|cook rice|keep cut flowers fresh|memorise a speech|make a paper airplane
swim faster
"""
WRITING = """
a short email asking a colleague to move a meeting|a product description of a reusable water bottle
a poem about the sea in winter|a birthday message for a grandmother|a story about a lost dog in three paragraphs
a summary of the causes of the First World War|a list of ten healthy snacks
a packing list for a weekend in the mountains|an apology to a customer whose parcel came late
a job advertisement for a school librarian|five questions for an interview with an astronaut
a dialogue between a cat and a mouse|a one-day plan for tourists in Rome
three arguments for school uniforms and three against|a slogan for a small bakery|a recipe for vegetable soup
instructions for a fire drill|a speech for a friend's wedding|a review of a very slow restaurant
a bedtime story about a brave snail|a letter to a landlord about a broken heater
an outline of an essay on renewable energy|a weekly exercise plan for beginners|a joke about computers
a tongue twister with the letter s|a description of a thunderstorm
"""
