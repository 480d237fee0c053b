"""Which language a text is in: by its script, and among languages of one script by common words and telling letters.

It needs a sentence or so. A text of which too few words are common ones or hold a telling letter is in no language, so noise
does not pass for English.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass

_SCRIPT_RANGES = (
    (0x0041, 0x024F, "latin"),
    (0x0370, 0x03FF, "greek"),
    (0x0400, 0x052F, "cyrillic"),
    (0x0590, 0x05FF, "hebrew"),
    (0x0600, 0x077F, "arabic"),
    (0x0900, 0x097F, "devanagari"),
    (0x0980, 0x09FF, "bengali"),
    (0x0A00, 0x0A7F, "gurmukhi"),
    (0x0A80, 0x0AFF, "gujarati"),
    (0x0B80, 0x0BFF, "tamil"),
    (0x0C00, 0x0C7F, "telugu"),
    (0x0C80, 0x0CFF, "kannada"),
    (0x0D00, 0x0D7F, "malayalam"),
    (0x0E00, 0x0E7F, "thai"),
    (0x1E00, 0x1EFF, "latin"),
    (0x3040, 0x30FF, "kana"),
    (0x4E00, 0x9FFF, "han"),
    (0xAC00, 0xD7A3, "hangul"),
)
_RANGE_STARTS = [start for start, _, _ in _SCRIPT_RANGES]
_MIN_KANA_SHARE = 0.1
"""Japanese mixes kana into Chinese characters; more than a stray one must be there."""
_LETTERS_PER_CHARACTER = {"han": 3, "kana": 3, "hangul": 3}
"""Where a character says more than a letter: a few borrowed Latin words do not outweigh the text around them."""
_MIN_EVIDENCE = 0.1
"""Share of words that must speak for the language; prose has three times as many."""
_WORD = re.compile(r"[^\s\d.,;:!?¿¡\"'’‘“”„«»()\[\]{}<>*_|/\\…。、！？।۔،؟#+=~`^&%$@-]+")


@dataclass(frozen=True, slots=True)
class _LanguageMarks:
    """What tells a language from the others of its script; nothing where the script alone does."""

    script: str
    words: frozenset[str] = frozenset()
    letters: frozenset[str] = frozenset()


def _language(script: str, words: str = "", letters: str = "") -> _LanguageMarks:
    return _LanguageMarks(script, frozenset(words.split()), frozenset(letters))


LANGUAGES = {
    "en": _language(
        "latin",
        "the of and to in is it that for was on are as with his they at be this have from or one had by but not what all"
        " were we when your can said there use an each which she do how their if will up other about out many then them"
        " these so some her would make like him into time has look two more write go see no way could people my than first"
        " been call who its now find long down day did get come made may part over new take only little work know place year"
        " live me back give most very after thing our just name good man think say great where help through much before line"
        " right too mean old any same tell boy follow came want show also around three small set put end does another well"
        " large must big even such because turn here why ask went men read need land different home us move try kind hand"
        " again change off play away house page letter answer found study still learn should world yes hello thank you"
        " please life never always every while often today love best a i",
    ),
    "es": _language(
        "latin",
        "el la de que y en un una los las del se por con no su para es al lo como más pero sus le ya o este sí porque esta"
        " entre cuando muy sin sobre también me hasta hay donde quien desde todo nos durante uno ni contra otros ese eso"
        " ellos esto antes está son fue ser mi tu te si gracias hola puede tiene",
        "ñ",
    ),
    "pt": _language(
        "latin",
        "o a de que e do da em um uma para com não os as no na por mais dos das se como mas ao ele à seu sua ou quando"
        " muito nos já eu também só pelo pela até isso ela entre depois sem mesmo aos seus quem nas me esse eles você essa"
        " são está é foi ser tem há obrigado pode",
        "ãõç",
    ),
    "fr": _language(
        "latin",
        "le la les de des du un une et à en que qui dans pour pas au ce il sur se ne plus par je avec tout faire son mais"
        " on sa ou comme nous vous ils elle sont est être avoir cette ces aux leur y si même aussi très bien où c d l j n s"
        " qu été votre notre merci bonjour peut",
        "èêœùûç",
    ),
    "de": _language(
        "latin",
        "der die das und in den von zu mit sich des auf für ist im dem nicht ein eine als auch es an werden aus er hat dass"
        " sie nach wird bei einer um am sind noch wie einem über einen so zum war haben nur oder aber vor zur bis mehr durch"
        " man ich wir kann ihr sehr wenn mein ja nein danke gut diese",
        "ßäöü",
    ),
    "it": _language(
        "latin",
        "il la di che e un una per in non è sono da con si le i del della dei delle al alla lo gli come più ma anche se nel"
        " nella ha questo questa ci io tu lui lei noi mi ti su o quando molto dove tutto essere fare sua suo loro perché"
        " grazie ciao può l d dell degli",
        "òì",
    ),
    "nl": _language(
        "latin",
        "de het een en van ik te dat die in is niet op aan met voor zijn er maar om hem dan zou of wat mijn men dit zo door"
        " over ze zich bij ook tot je mij uit der daar haar naar heb heeft hebben deze worden wordt nog zal wij geen veel"
        " kan",
    ),
    "sv": _language(
        "latin",
        "och i att det som en på är av för med till den har de inte om ett han men var jag sig från vi så kan när år under"
        " också eller nu sin där vid mot ska skulle alla mycket detta dem då bara hon",
        "åäö",
    ),
    "pl": _language(
        "latin",
        "i w na z do nie się to jest że o jak po co ale od za przez dla są był tak być może ich jego tego tym tylko oraz"
        " już czy jako bardzo lub gdy które który która ja my",
        "łąężźśćń",
    ),
    "cs": _language(
        "latin",
        "a v se na je že o s z do i to jako za by k pro ale jsou byl jeho po který která které tak od nebo již při když ve"
        " si jsem bylo velmi také",
        "řěůčšž",
    ),
    "ro": _language(
        "latin",
        "și în de la cu a pe un o nu este care din pentru că mai sau să sunt ce fi se al ale au fost ca dar prin după lui",
        "șțăî",
    ),
    "fi": _language(
        "latin",
        "ja on ei se että oli hän mutta kuin joka niin ovat myös kun tai voi sen hänen ole olla sekä jos minä me he tämä"
        " tämän jo vain ollut mukaan hyvin ne",
        "äö",
    ),
    "tr": _language(
        "latin",
        "ve bir bu da de için ile çok olarak daha gibi olan ne en kadar sonra ama o ben var her değil mi ya iki şey bana"
        " oldu ise",
        "ğışçöü",
    ),
    "id": _language(
        "latin",
        "yang dan di ini itu dengan untuk tidak dari dalam akan pada ke adalah saya kami mereka bisa oleh ada juga karena"
        " dapat telah sebagai atau lebih kita orang sangat",
    ),
    "vi": _language(
        "latin",
        "và của là có cho không được một các trong với người những đã này khi để tôi từ ra như cũng về rất",
        "đơưạảấầẩẫậắằẳẵặẹẻẽếềểễệỉịọỏốồổỗộớờởỡợụủứừửữựỳỵỷỹ",
    ),
    "sw": _language(
        "latin",
        "na ya wa kwa ni katika za la kuwa hii kama lakini au pia si cha yake vya watu wake huo hiyo baada kila sana mimi"
        " wewe yeye sisi ambayo hili mtu ili",
    ),
    "ru": _language(
        "cyrillic",
        "и в не на я что он с как это по но они к у ты из мы за вы так же от о для все было быть только его она или если"
        " когда очень можно есть этот может"
        " при без нет уже то до под ещё во их будет были где нельзя него том эта эти чтобы была мне меня",
        "ыэё",
    ),
    "uk": _language(
        "cyrillic",
        "і в не на я що він з як це та але у й до ти ми за ви так від для все його вона або якщо є також дуже",
        "іїєґ",
    ),
    "bg": _language(
        "cyrillic",
        "и в не на да се от е за с че са ще той това като по но си аз ти ние или които много може има във само към който",
        "ъ",
    ),
    "ar": _language(
        "arabic", "في من على إلى أن هذا هذه التي الذي لا ما هو هي كان عن مع و أو كل بعد ذلك لم قد كما نحن أنا", "ةىيكأإ"
    ),
    "fa": _language(
        "arabic", "و در به از که این را با است برای آن یک خود تا کرد بر هم نیز می شود ما من هر شما بود دارد", "پچژگکی"
    ),
    "ur": _language(
        "arabic", "اور کے میں کی ہے کا سے کو نے یہ کہ پر ہیں اس ایک نہیں وہ بھی تو ہم آپ کر لیے جو ہو تھا", "پچژگکیٹڈڑںےہھ"
    ),
    "hi": _language("devanagari", "है हैं और का की के में को से यह नहीं एक पर भी कि ने हम वह तो था हो कर इस लिए जो मैं आप बहुत"),
    "mr": _language("devanagari", "आहे आहेत आणि हे ही तो ती ते नाही एक या व पण मी आपण होते होता करून साठी खूप मध्ये असे केले", "ळ"),
    "ne": _language("devanagari", "छ छन् र को मा हो यो पनि छैन हुन्छ लागि गर्न एक म हामी तर भने थियो गरेको धेरै यस त्यो हुन् गर्छ"),
    "ja": _language("kana"),
    "zh": _language("han"),
    "ko": _language("hangul"),
    "el": _language("greek"),
    "he": _language("hebrew"),
    "bn": _language("bengali"),
    "pa": _language("gurmukhi"),
    "gu": _language("gujarati"),
    "ta": _language("tamil"),
    "te": _language("telugu"),
    "kn": _language("kannada"),
    "ml": _language("malayalam"),
    "th": _language("thai"),
}
"""By ISO 639-1 code."""


def is_in(text: str, language: str) -> bool:
    """Whether no other language fits the text better. `zh-cn` and `pt-BR` are read as `zh` and `pt`."""
    code = language.partition("-")[0].lower()
    wanted = LANGUAGES[code]
    if _script(text) != wanted.script:
        return False
    rivals = {name: profile for name, profile in LANGUAGES.items() if profile.script == wanted.script}
    if len(rivals) == 1:
        return True
    counts = Counter(_WORD.findall(text.lower()))
    evidence = {name: _evidence(counts, profile) for name, profile in rivals.items()}
    return evidence[code] == max(evidence.values()) and evidence[code] > _MIN_EVIDENCE * counts.total()


def _script(text: str) -> str | None:
    """The script of most letters."""
    counts: Counter[str] = Counter()
    for character, count in Counter(text).items():
        start, end, script = _SCRIPT_RANGES[bisect_right(_RANGE_STARTS, ord(character)) - 1]
        if character.isalpha() and start <= ord(character) <= end:
            counts[script] += count * _LETTERS_PER_CHARACTER.get(script, 1)
    if counts["kana"] > _MIN_KANA_SHARE * (counts["kana"] + counts["han"]):
        counts["kana"] += counts.pop("han", 0)
    return max(counts, key=lambda script: counts[script]) if counts.total() else None


def _evidence(counts: Counter[str], language: _LanguageMarks) -> int:
    """How many words are common ones of the language, plus how many hold one of its telling letters."""
    common = sum(count for word, count in counts.items() if word in language.words)
    telling = sum(count for word, count in counts.items() if not language.letters.isdisjoint(word))
    return common + telling
