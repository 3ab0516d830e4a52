"""Countries, waters, mountains, sights and foods: one line for each, fields apart by |."""

# name | capital | continent | currency | language
COUNTRIES = """
France|Paris|Europe|euro|French
Germany|Berlin|Europe|euro|German
Spain|Madrid|Europe|euro|Spanish
Italy|Rome|Europe|euro|Italian
Portugal|Lisbon|Europe|euro|Portuguese
Greece|Athens|Europe|euro|Greek
Austria|Vienna|Europe|euro|German
Ireland|Dublin|Europe|euro|English and Irish
Finland|Helsinki|Europe|euro|Finnish
Sweden|Stockholm|Europe|krona|Swedish
Norway|Oslo|Europe|krone|Norwegian
Denmark|Copenhagen|Europe|krone|Danish
Iceland|Reykjavik|Europe|krona|Icelandic
Poland|Warsaw|Europe|zloty|Polish
Hungary|Budapest|Europe|forint|Hungarian
Romania|Bucharest|Europe|leu|Romanian
Ukraine|Kyiv|Europe|hryvnia|Ukrainian
Serbia|Belgrade|Europe|dinar|Serbian
Albania|Tirana|Europe|lek|Albanian
Slovakia|Bratislava|Europe|euro|Slovak
Slovenia|Ljubljana|Europe|euro|Slovene
Estonia|Tallinn|Europe|euro|Estonian
Latvia|Riga|Europe|euro|Latvian
Lithuania|Vilnius|Europe|euro|Lithuanian
Malta|Valletta|Europe|euro|Maltese and English
Switzerland|Bern|Europe|franc|German, French and Italian
Belgium|Brussels|Europe|euro|Dutch and French
the Netherlands|Amsterdam|Europe|euro|Dutch
the United Kingdom|London|Europe|pound|English
Russia|Moscow|Europe and Asia|rouble|Russian
Turkey|Ankara|Asia and Europe|lira|Turkish
Japan|Tokyo|Asia|yen|Japanese
China|Beijing|Asia|yuan|Mandarin Chinese
India|New Delhi|Asia|rupee|Hindi and English
Pakistan|Islamabad|Asia|rupee|Urdu and English
Nepal|Kathmandu|Asia|rupee|Nepali
Bangladesh|Dhaka|Asia|taka|Bengali
Sri Lanka|Colombo|Asia|rupee|Sinhala and Tamil
Thailand|Bangkok|Asia|baht|Thai
Vietnam|Hanoi|Asia|dong|Vietnamese
Cambodia|Phnom Penh|Asia|riel|Khmer
Laos|Vientiane|Asia|kip|Lao
Malaysia|Kuala Lumpur|Asia|ringgit|Malay
Indonesia|Jakarta|Asia|rupiah|Indonesian
the Philippines|Manila|Asia|peso|Filipino and English
South Korea|Seoul|Asia|won|Korean
Mongolia|Ulaanbaatar|Asia|tugrik|Mongolian
Kazakhstan|Astana|Asia|tenge|Kazakh and Russian
Iran|Tehran|Asia|rial|Persian
Iraq|Baghdad|Asia|dinar|Arabic and Kurdish
Israel|Jerusalem|Asia|shekel|Hebrew
Jordan|Amman|Asia|dinar|Arabic
Lebanon|Beirut|Asia|pound|Arabic
Saudi Arabia|Riyadh|Asia|riyal|Arabic
Oman|Muscat|Asia|rial|Arabic
Qatar|Doha|Asia|riyal|Arabic
Egypt|Cairo|Africa|pound|Arabic
Morocco|Rabat|Africa|dirham|Arabic and Berber
Algeria|Algiers|Africa|dinar|Arabic and Berber
Tunisia|Tunis|Africa|dinar|Arabic
Libya|Tripoli|Africa|dinar|Arabic
Ethiopia|Addis Ababa|Africa|birr|Amharic
Kenya|Nairobi|Africa|shilling|Swahili and English
Tanzania|Dodoma|Africa|shilling|Swahili and English
Uganda|Kampala|Africa|shilling|English and Swahili
Rwanda|Kigali|Africa|franc|Kinyarwanda
Ghana|Accra|Africa|cedi|English
Nigeria|Abuja|Africa|naira|English
Senegal|Dakar|Africa|CFA franc|French
Mali|Bamako|Africa|CFA franc|Bambara
Angola|Luanda|Africa|kwanza|Portuguese
Mozambique|Maputo|Africa|metical|Portuguese
Zambia|Lusaka|Africa|kwacha|English
Namibia|Windhoek|Africa|dollar|English
Botswana|Gaborone|Africa|pula|English and Tswana
Madagascar|Antananarivo|Africa|ariary|Malagasy and French
Canada|Ottawa|North America|dollar|English and French
Mexico|Mexico City|North America|peso|Spanish
Cuba|Havana|North America|peso|Spanish
Jamaica|Kingston|North America|dollar|English
Haiti|Port-au-Prince|North America|gourde|Haitian Creole and French
Guatemala|Guatemala City|North America|quetzal|Spanish
Costa Rica|San Jose|North America|colon|Spanish
Panama|Panama City|North America|balboa|Spanish
the United States|Washington, D.C.|North America|dollar|English
Brazil|Brasilia|South America|real|Portuguese
Argentina|Buenos Aires|South America|peso|Spanish
Chile|Santiago|South America|peso|Spanish
Peru|Lima|South America|sol|Spanish and Quechua
Colombia|Bogota|South America|peso|Spanish
Ecuador|Quito|South America|US dollar|Spanish
Bolivia|Sucre|South America|boliviano|Spanish
Uruguay|Montevideo|South America|peso|Spanish
Paraguay|Asuncion|South America|guarani|Spanish and Guarani
Venezuela|Caracas|South America|bolivar|Spanish
Australia|Canberra|Oceania|dollar|English
New Zealand|Wellington|Oceania|dollar|English and Maori
Fiji|Suva|Oceania|dollar|English and Fijian
Samoa|Apia|Oceania|tala|Samoan and English
Papua New Guinea|Port Moresby|Oceania|kina|Tok Pisin and English
"""
# name | where | what it flows into
RIVERS = """
Nile|northeastern Africa|the Mediterranean Sea
Amazon|South America|the Atlantic Ocean
Mississippi|the United States|the Gulf of Mexico
Danube|central and southeastern Europe|the Black Sea
Rhine|western Europe|the North Sea
Volga|Russia|the Caspian Sea
Ganges|India and Bangladesh|the Bay of Bengal
Indus|Pakistan|the Arabian Sea
Yangtze|China|the East China Sea
Mekong|Southeast Asia|the South China Sea
Congo|central Africa|the Atlantic Ocean
Niger|West Africa|the Gulf of Guinea
Zambezi|southern Africa|the Indian Ocean
Thames|England|the North Sea
Seine|France|the English Channel
Elbe|the Czech Republic and Germany|the North Sea
Po|northern Italy|the Adriatic Sea
Tigris|Turkey and Iraq|the Persian Gulf
Jordan|the Middle East|the Dead Sea
Colorado|the southwestern United States|the Gulf of California
Rio Grande|the United States and Mexico|the Gulf of Mexico
Saint Lawrence|Canada|the Atlantic Ocean
Murray|Australia|the Southern Ocean
Orinoco|Venezuela|the Atlantic Ocean
"""
# name | where it is
SIGHTS = """
Eiffel Tower|Paris
Colosseum|Rome
Great Wall of China|northern China
Taj Mahal|Agra in India
Statue of Liberty|New York City
Golden Gate Bridge|San Francisco
Big Ben|London
Machu Picchu|the Andes of Peru
Angkor Wat|Cambodia
Petra|Jordan
Acropolis|Athens
Sagrada Familia|Barcelona
Brandenburg Gate|Berlin
Stonehenge|southern England
Sydney Opera House|Sydney
Leaning Tower of Pisa|Pisa in Italy
Hagia Sophia|Istanbul
Alhambra|Granada in Spain
Mount Rushmore|South Dakota
Grand Canyon|Arizona
Niagara Falls|the border of Canada and the United States
Victoria Falls|the border of Zambia and Zimbabwe
Great Barrier Reef|the coast of Queensland in Australia
Mount Everest|the border of Nepal and China
Kilimanjaro|Tanzania
Mont Blanc|the border of France and Italy
Mount Fuji|Japan
Matterhorn|the border of Switzerland and Italy
Sahara|northern Africa
Gobi Desert|Mongolia and China
Dead Sea|the border of Israel and Jordan
Lake Baikal|Siberia
Lake Victoria|East Africa
Panama Canal|Panama
Suez Canal|Egypt
Louvre|Paris
Kremlin|Moscow
Forbidden City|Beijing
Uluru|central Australia
Yellowstone|Wyoming
"""
# what | where it comes from
FOODS = """
pizza|Italy
sushi|Japan
paella|Spain
tacos|Mexico
croissants|France
feta cheese|Greece
kimchi|Korea
goulash|Hungary
hummus|the Middle East
curry|South Asia
pho|Vietnam
pierogi|Poland
couscous|North Africa
fondue|Switzerland
ramen|Japan
ceviche|Peru
baklava|Turkey
poutine|Canada
risotto|Italy
borscht|Ukraine
tofu|China
chocolate|Central America
coffee|Ethiopia
tea|China
maple syrup|Canada
cheddar cheese|England
gazpacho|Spain
dumplings|China
naan bread|South Asia
tiramisu|Italy
"""
