"""The word lists of everyday.py: functions worth writing, texts and code worth changing, notes worth reading. Everything in them is made up.

No task here is one of HumanEval's 164. Nothing here knows how pieces become a prompt.
"""

from __future__ import annotations


def _lines(text: str) -> list[str]:
    """One entry per line; a line that begins with spaces goes on with the one before."""
    return text.strip().replace("\n    ", "").splitlines()


def _words(text: str, separator: str = " ") -> list[str]:
    return text.split(separator)


# names | arguments | what it does, in wordings that complete "a function that ...". Separated by "/" are choices; {n} is a small number.
FUNCTIONS = _lines("""
celsius_to_fahrenheit/c_to_f/to_fahrenheit | celsius/degrees/c | converts a temperature from Celsius to Fahrenheit
    /turns degrees Celsius into degrees Fahrenheit
km_to_miles/kilometers_to_miles | km/distance | converts kilometers to miles/takes a distance in kilometers and returns it in miles
kg_to_pounds/kilograms_to_pounds | kg/weight | converts kilograms to pounds/takes a weight in kilograms and returns it in pounds
hours_to_seconds/to_seconds | hours/h | converts hours to seconds/returns how many seconds there are in the given hours
minutes_to_clock/format_minutes | minutes/total | turns a number of minutes into text like '2h 05m'
    /formats minutes as hours and minutes, such as '1h 30m'
rectangle_area/area_of_rectangle | width, height/w, h | returns the area of a rectangle/computes the area of a rectangle from its two sides
rectangle_perimeter/perimeter_of_rectangle | width, height/a, b | returns the perimeter of a rectangle/adds up the four sides of a rectangle
circle_area/area_of_circle | radius/r | returns the area of a circle/computes a circle's area from its radius
box_volume/volume_of_box | length, width, height/a, b, c | returns the volume of a box/multiplies the three sides of a box
average/mean_of/get_average | numbers/values/scores | returns the average of a list of numbers, or 0 for an empty list
    /computes the mean of a list and returns 0 if it is empty
value_range/spread | numbers/values | returns the difference between the largest and the smallest number of a list
    /subtracts the minimum of a list from its maximum
double_all/doubled | numbers/values/nums | returns a new list with every number doubled/multiplies each number of a list by two
scale_all/multiply_all | numbers/values | multiplies every number of a list by {n}/returns a list in which each number is {n} times as large
halve_all/halved | numbers/values | divides every number of a list by two/returns a list with half of each number
count_larger/how_many_above | numbers/values | counts the numbers of a list that are larger than {n}/returns how many numbers in a list exceed {n}
clamp/limit_value | value, low, high/x, lower, upper | returns the value, but no less than the lower and no more than the upper bound
    /keeps a number within two bounds
is_between/within | value, low, high/x, start, end | returns True if a number lies between two bounds/checks whether a value is in a closed interval
is_multiple/divides_evenly | number/n/value | returns True if a number is divisible by {n}/checks whether {n} divides a number without a remainder
sign_name/describe_sign | number/x | returns 'positive', 'negative' or 'zero' for a number
    /says in one word whether a number is above, below or equal to zero
absolute_difference/distance_between | a, b/x, y | returns the absolute difference of two numbers/computes how far apart two numbers are
percentage_of/as_percent | part, whole/value, total | returns what percentage the first number is of the second/computes a share in percent
percent_change/relative_change | old, new/before, after | returns by how many percent a value changed
    /computes the change from the old to the new value in percent
apply_discount/discounted_price | price, percent/amount, discount | returns a price after a discount in percent/lowers a price by the given percentage
add_tax/price_with_tax | price/net/amount | adds {n} percent tax to a price/returns a price including a tax of {n} percent
split_bill/share_per_person | total, people/bill, guests | divides a bill evenly and rounds to two decimals/returns what each person has to pay
add_tip/total_with_tip | bill, percent/amount, tip | returns a bill with a tip in percent added/computes what a guest pays with tip
simple_interest/interest_earned | amount, rate, years/principal, rate, time | returns the simple interest on an amount
    /multiplies principal, yearly rate and years
compound_value/future_value | amount, rate, years/principal, rate, n | returns an amount after some years of compound interest
    /computes a deposit's value with interest paid yearly
body_mass_index/bmi | weight, height/kg, meters | returns the body mass index of a person
    /divides a weight in kilograms by the height in meters squared
shipping_cost/delivery_fee | weight/kg | returns {n} for parcels below 5 kilograms and twice as much for others
    /computes a fee of {n}, doubled from 5 kilograms on
cart_total/total_price | prices, quantities/costs, counts | adds up each price times its quantity
    /returns the total cost of two lists, prices and quantities
to_title/capitalize_words | text/sentence/name | capitalizes the first letter of every word/returns a text with each word capitalized
reverse_text/backwards | text/word/s | returns a string in reverse order/turns a string around
reverse_words/flip_word_order | sentence/text | returns a sentence with its words in reverse order/reverses the order of the words of a text
word_count/count_words | text/sentence | returns the number of words in a text/counts the words of a sentence
line_count/count_lines | text/content | returns the number of lines in a text/counts how many lines a string has
average_word_length/mean_word_length | text/sentence | returns the average length of the words in a text
    /computes how long the words of a sentence are on average
long_words/words_longer | text/sentence | returns the words of a text that have more than {n} letters/lists all words longer than {n} characters
first_words/opening_words | text/sentence | returns the first {n} words of a text/keeps only the first {n} words of a sentence
shorten/ellipsize | text/title | cuts a text after {n} characters and adds '...' if it was longer
    /shortens a string to {n} characters followed by '...'
initials/get_initials | name/full_name | returns the initials of a full name in upper case/takes a name such as 'ada king' and returns 'AK'
first_name/given_name | full_name/name | returns the first word of a full name/takes a full name and returns the given name
greet/greeting | name/person | returns the text 'Hello, NAME!' for a name/builds a greeting for a person
full_name/join_names | first, last/given, family | joins a first and a last name with a space/builds a full name from two parts
slugify/make_slug | title/text | makes a title lower case and puts hyphens in place of spaces/turns a title into a slug like 'my-first-post'
snake_to_camel/to_camel_case | name/text | turns snake_case into camelCase/converts a name with underscores to camel case
kebab_to_snake/hyphens_to_underscores | name/text | replaces hyphens by underscores/turns a name such as 'my-file' into 'my_file'
strip_punctuation/without_punctuation | text/sentence | removes the characters . , ! and ? from a text/returns a text without punctuation marks
only_digits/keep_digits | text/s | keeps only the digits of a string/returns all digits found in a text as a string
only_letters/keep_letters | text/s | keeps only the letters of a string/drops every character that is not a letter
count_spaces/number_of_spaces | text/s | counts the spaces in a string/returns how many spaces a text contains
contains_word/has_word | text, word/sentence, term | returns True if a text contains a word, ignoring case
    /checks whether a word is part of a sentence in any case
starts_with_capital/is_capitalized | text/word | returns True if a string begins with a capital letter
    /checks whether the first character is upper case
pad_number/zero_pad | number/n/value | writes a number with leading zeros, {n} digits wide/returns a number as a string of {n} digits
repeat_text/times | text/word | repeats a string {n} times, separated by spaces/returns a text {n} times with spaces between
mask_card/hide_digits | number/card | replaces all but the last four characters by '*'/hides a card number except its last four digits
file_extension/get_extension | filename/name | returns the part of a file name after the last dot/takes a name such as 'a.txt' and returns 'txt'
remove_extension/file_stem | filename/name | returns a file name without its extension/takes 'notes.txt' and returns 'notes'
email_domain/domain_of | email/address | returns the part of an e-mail address after the @/takes an address and returns its domain
is_valid_email/looks_like_email | email/text | returns True if a text has exactly one @ and a dot after it
    /checks in a simple way whether a string is an e-mail address
is_strong_password/check_password | password/text | returns True if a password has at least {n} characters and a digit
    /accepts passwords of {n} or more characters that contain a digit
format_price/as_dollars | amount/price | formats a number as a price such as '$4.50'/returns an amount with a dollar sign and two decimals
format_date/date_text | year, month, day/y, m, d | returns a date as text in the form YYYY-MM-DD
    /joins year, month and day with hyphens and leading zeros
is_leap_year/leap | year/y | returns True if a year is a leap year/checks whether a year has 366 days
days_in_month/month_length | month/m | returns the number of days of a month in a normal year
    /takes a month from 1 to 12 and returns how many days it has
is_weekend/on_weekend | day/weekday | returns True for 'Saturday' and 'Sunday'/checks whether the name of a day is on the weekend
season_of/get_season | month/m | returns the season of a month from 1 to 12/takes a month number and returns 'winter', 'spring', 'summer' or 'autumn'
can_vote/is_adult | age/years | returns True if an age is at least 18/checks whether somebody is 18 or older
ticket_price/entry_fee | age/years | returns {n} for adults and half of it for children under 12/computes a price of {n}, halved below the age of 12
first_item/head | items/values | returns the first element of a list, or None if it is empty
    /gives back a list's first item and None where there is none
last_item/tail_item | items/values | returns the last element of a list, or None if it is empty/gives back the final item of a list
first_n/take | items/values | returns the first {n} elements of a list/keeps only the first {n} items
every_second/alternate_items | items/values | returns every second element of a list/takes the items at positions 0, 2, 4 and so on
chunk/split_into_chunks | items/values | splits a list into parts of {n} elements/cuts a list into chunks of size {n}
flatten/merge_lists | lists/nested/rows | turns a list of lists into one flat list/joins all inner lists into a single one
pair_up/zip_lists | first, second/a, b | returns a list of pairs of two lists/combines two lists element by element into tuples
swap_ends/exchange_ends | items/values | swaps the first and the last element of a list/returns a list with its two ends exchanged
index_of/position_of | items, target/values, wanted | returns the position of an element in a list, or -1
    /finds where an item stands in a list and returns -1 if it is missing
count_item/occurrences | items, target/values, wanted | counts how often an element occurs in a list/returns the number of times an item is in a list
without_item/drop_all | items, target/values, unwanted | returns a list without any copy of the given element
    /removes all occurrences of an item from a list
all_equal/same_items | items/values | returns True if all elements of a list are equal/checks whether a list holds only one distinct value
has_duplicates/any_twice | items/values | returns True if an element occurs more than once/checks whether a list contains duplicates
running_total/cumulative_sum | numbers/values | returns the list of running totals/computes the cumulative sums of a list
differences/steps_between | numbers/values | returns the differences of neighbouring numbers/subtracts each number of a list from the next one
rotate_left/move_first_to_end | items/values | moves the first element of a list to its end/returns a list in which the first item has become the last
join_with_commas/comma_list | items/words | joins a list of strings with commas/returns the words of a list as one string, separated by ', '
parse_pair/parse_setting | text/line | splits 'key=value' into a tuple of key and value
    /takes a line such as 'a=1' and returns both sides of the equals sign
to_numbers/parse_numbers | text/line | turns a string of numbers with spaces between into a list of integers/parses '1 2 3' into a list of ints
count_letters/letter_counts | text/word | returns a dictionary that counts each letter of a text
    /maps every character of a string to how often it occurs
count_each/tally | items/values | returns a dictionary with the count of each element/counts how often each item of a list occurs
most_common/most_frequent | items/words | returns the element that occurs most often/finds the most frequent item of a list
invert_dict/swap_keys_and_values | data/mapping | returns a dictionary with keys and values swapped
    /turns a dictionary around, so that its values become keys
merge_dicts/combine | first, second/a, b | merges two dictionaries, the second one winning/returns one dictionary with the entries of both
get_or_default/lookup | data, key/mapping, name | returns the value of a key, or {n} if it is missing
    /looks up a key in a dictionary and falls back to {n}
drop_none/without_none | data/record | returns a dictionary without the keys whose value is None/removes all entries of a dictionary that are None
largest_value_key/key_of_max | data/scores | returns the key with the largest value of a dictionary/finds the name with the highest score
sum_values/total_of | data/costs | returns the sum of all values of a dictionary/adds up what a dictionary holds
group_by_length/words_by_length | words/items | groups words by their length in a dictionary/maps each length to the list of words that have it
group_by_initial/by_first_letter | words/names | groups words by their first letter in a dictionary/maps each initial to the words that begin with it
factorial/fact | n/number | returns the factorial of a number/multiplies all numbers from 1 to n
power/raise_to | base, exponent/x, n | computes a power with a loop/multiplies a number by itself the given number of times
multiplication_table/times_table | number/n | returns the first {n} multiples of a number as a list/lists a number times 1 up to {n}
countdown/count_down | start/n | returns the numbers from start down to 0 as a list/lists all numbers from the given one down to zero
grid/make_grid | rows, columns/height, width | returns a list of rows, each filled with zeros/builds a two-dimensional list of zeros
transpose/flip_table | rows/matrix/table | swaps the rows and columns of a list of lists/transposes a matrix given as a list of rows
row_sums/sum_rows | rows/matrix | returns the sum of every row of a matrix/adds up each inner list
""")

# thing | key | fields with numbers: dictionaries that programs keep in lists.
RECORDS = _lines("""
product | name | price, stock, weight, rating
book | title | pages, year, price, copies
employee | name | salary, age, hours, bonus
student | name | score, age, grade, absences
city | name | population, area, altitude, rainfall
movie | title | year, length, rating, budget
order | customer | amount, items, discount, shipping
recipe | name | minutes, servings, calories, cost
song | title | length, plays, year, likes
hotel | name | rooms, stars, price, distance
car | model | speed, mileage, price, doors
team | name | wins, losses, goals, points
flight | number | seats, delay, distance, fare
plant | name | height, water, light, cost
task | title | priority, hours, progress, budget
invoice | customer | total, tax, days, discount
""")

# name of the function | what it does; {thing}, {things}, {key}, {field}, {n}.
RECORD_TASKS = _lines("""
total_{field} | returns the sum of '{field}' over a list of {thing} dictionaries
average_{field} | returns the average '{field}' of a list of {thing} dictionaries, or 0 if the list is empty
{thing}_with_most_{field} | returns the {thing} dictionary with the largest '{field}'
{thing}_with_least_{field} | returns the {thing} dictionary with the smallest '{field}'
sort_{things}_by_{field} | sorts a list of {thing} dictionaries by '{field}', smallest first
rank_{things}_by_{field} | sorts a list of {thing} dictionaries by '{field}', largest first
{things}_above_{field} | keeps the {thing} dictionaries whose '{field}' is greater than {n}
{things}_below_{field} | keeps the {thing} dictionaries whose '{field}' is less than {n}
count_{things}_by_{field} | counts the {thing} dictionaries whose '{field}' is at least {n}
{field}_by_{key} | returns a dictionary that maps each {thing}'s '{key}' to its '{field}'
{key}s_with_{field} | lists the '{key}' of every {thing} dictionary whose '{field}' is not 0
raise_{field} | adds {n} to the '{field}' of every {thing} dictionary in a list
list_{field}_values | returns a list of the '{field}' of every {thing} dictionary
top_{things}_by_{field} | returns the {n} {thing} dictionaries with the largest '{field}'
""")

PEOPLE = _words(
    "Anna Ben Clara David Emma Felix Grace Henry Iris Jack Karen Liam Maria Noah Olivia Paul Rosa Sam Tina Victor Wendy Yusuf Zoe Amir Beth Carlos "
    "Diana Erik Fatima George Hannah Ivan Julia Kenji Laura Marco Nina Oscar Priya Ruth"
)
SURNAMES = _words(
    "Baker Berg Costa Diaz Evans Fischer Garcia Hill Ito Jensen Khan Lopez Moore Novak Olsen Patel Quinn Rossi Silva Turner Weber Young"
)
CITIES = _words(
    "Lisbon Berlin Oslo Madrid Vienna Boston Denver Dublin Prague Athens Chicago Toronto Kyoto Lima Nairobi Sydney Warsaw Geneva Seattle Austin"
)
MONTHS = _words("January February March April May June July August September October November December")
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
PRODUCTS = _words(
    "desk lamps, notebooks, office chairs, coffee mugs, backpacks, headphones, water bottles, keyboards, umbrellas, phone cases, candles, towels, "
    "board games, wall clocks, bicycle helmets, running shoes, picture frames, garden tools, flower pots, pillows",
    ", ",
)
COMPANIES = _words(
    "Bluebird Media, Harbor Foods, Oak Street Bank, Silver Lake Energy, Maple Software, Red Door Travel, Summit Tools, Green Field Farms, "
    "Lantern Books, Stone Bridge Legal, Cedar Health, Bright Path Schools",
    ", ",
)
JOBS = _words(
    "nurse, software engineer, teacher, bank clerk, designer, plumber, project manager, cook, data analyst, librarian, pilot, reporter", ", "
)
EVENTS = _words(
    "jazz concert, book fair, cooking class, chess tournament, science lecture, dance show, charity run, film night, poetry reading, flea market",
    ", ",
)

SUBJECTS = [*PEOPLE[:24], "My sister", "The teacher", "Our neighbor", "The new manager", "His uncle", "The driver", "Her friend", "The doctor"]
ACTIONS = _words(
    "walks to the office, opens the small shop, writes a long letter, cooks dinner for the family, plays tennis in the park, cleans the kitchen, "
    "visits an old friend, buys fresh bread, reads the newspaper, calls the customer, repairs the old bicycle, paints the garden fence, "
    "waters the flowers, teaches a math class, drives the blue car, takes the early train, sends the report, closes the windows, "
    "brings a cup of tea, finds the lost keys, makes a short list, helps the children, checks the numbers, carries the heavy boxes",
    ", ",
)
WHEN = _words(
    "every morning, in the afternoon, after work, before lunch, on weekends, with great care, without any help, near the river, on the first day, "
    "in the evening, at the station, with a smile",
    ", ",
)
# {name}, {thing}, {day}: as people write in a hurry.
INFORMAL = _lines("""
hey {name}, can u send me the {thing} by {day}? thx
yo {name}, gonna need the {thing} on {day}, ok?
hi {name}! sorry, can't find the {thing}, did u take it on {day}?
{name}, pls fix the {thing} asap, the boss wants it {day}
hey {name}, the {thing} looks awesome, let's talk {day}!
{name}, wanna go over the {thing} with me on {day}?
hi {name}, i kinda lost the {thing}, gimme a new one by {day} pls
hey {name}, no way we get the {thing} done before {day}, sorry!
""")
DOCUMENTS = _words(
    "report, invoice, contract, slides, budget, meeting notes, schedule, photos, price list, draft, form, guest list, manual, survey", ", "
)
LISTS = (
    "apples pears bananas cherries grapes lemons oranges plums mangoes peaches",
    "hammer saw drill wrench pliers chisel ladder shovel screwdriver tape",
    "dog cat horse rabbit eagle tiger otter camel goat zebra",
    "red blue green yellow purple orange black white brown pink",
    "bread milk eggs butter cheese rice pasta salt sugar honey",
    "table chair sofa shelf lamp desk carpet mirror curtain wardrobe",
)
# Code around one variable {v}: what it starts as, by kind, and what is done with it.
SETUPS = {
    "number": ["{v} = 12", "{v} = len(names)", "{v} = price * 3", "{v} = sum(costs)", "{v} = max(scores)", "{v} = int(text)", "{v} = round(rate, 2)"],
    "list": [
        "{v} = [3, 1, 2]",
        "{v} = line.split(',')",
        "{v} = list(data.keys())",
        "{v} = ['red', 'blue']",
        "{v} = sorted(names)",
        "{v} = load_rows()",
    ],
}
USES = {
    "number": [
        "print({v})", "if {v} > 10:\n    print('large:', {v})", "while {v} > 0:\n    {v} -= 1", "square = {v} * {v}", "half = {v} / 2\nprint(half)",
        "for i in range({v}):\n    print(i)", "text = str({v})", "{v} = {v} + 1", "result.append({v})", "if {v} == 0:\n    raise ValueError('zero')",
    ],
    "list": [
        "for item in {v}:\n    print(item)", "{v}.append(4)", "print(len({v}))", "if not {v}:\n    print('empty')", "first = {v}[0]",
        "last = {v}[-1]\nprint(last)", "copy = list({v})", "{v}.reverse()", "pairs = list(enumerate({v}))", "save({v})",
    ],
}  # fmt: skip
NAMES = {
    "number": _words("x n a val tmp num total count amount size limit score value budget length"),
    "list": _words("xs l a lst tmp data items values rows entries words records colors parts results"),
}
# Notes with their {fields}, told in several ways.
NOTES = {
    "order": (
        "{person} ordered {quantity} {product} for {price} on {date}.",
        "On {date}, {person} bought {quantity} {product} and paid {price}.",
        "Order received {date}: {quantity} {product}, customer {person}, total {price}.",
    ),
    "meeting": (
        "{person} meets {company} in {city} on {date} at {time}.",
        "Reminder: meeting with {company} on {date}, {time}, in {city}. {person} will attend.",
        "The meeting of {person} and {company} takes place in {city} at {time} on {date}.",
    ),
    "contact": (
        "You can reach {person} of {company} at {email} or by phone at {phone}.",
        "{person} works for {company}. E-mail: {email}, phone: {phone}.",
        "New contact from {company}: {person}, {email}, {phone}.",
    ),
    "trip": (
        "{person} flies from {origin} to {city} on {date}; the ticket costs {price}.",
        "Flight booked for {person}: {origin} to {city}, {date}, {price}.",
        "For {price}, {person} takes the train from {origin} to {city} on {date}.",
    ),
    "invoice": (
        "Invoice {number} from {company} over {price} is due on {date}.",
        "{company} sent invoice {number}. Please pay {price} by {date}.",
        "Please note that {price} for invoice {number} must reach {company} before {date}.",
    ),
    "job": (
        "{person}, {age}, starts as a {job} at {company} in {city}.",
        "{company} in {city} hired {person} ({age} years old) as a {job}.",
        "At the age of {age}, {person} moved to {city} to work as a {job} for {company}.",
    ),
    "event": (
        "The {event} in {city} starts at {time} on {date}. Tickets cost {price}.",
        "Join us for a {event} on {date} at {time} in {city}, entry {price}.",
        "Tickets for the {event} in {city} ({date}, {time}) are {price}.",
    ),
    "delivery": (
        "{company} will deliver {quantity} {product} to {city} on {date}.",
        "Delivery on {date}: {quantity} {product} from {company}, to be sent to {city}.",
        "Our warehouse in {city} expects {quantity} {product} from {company} on {date}.",
    ),
}
