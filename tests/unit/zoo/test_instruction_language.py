from __future__ import annotations

import pytest

from reroll_zoo.ifeval.language import LANGUAGES, is_in

TEXTS = {
    "en": "It rained all night. We stayed in the old house and told each other stories until the sun came up.",
    "es": "Anoche llovió mucho. Nos quedamos en la casa vieja y contamos historias hasta que salió el sol.",
    "pt": "Choveu muito ontem à noite. Ficamos na casa velha e contamos histórias até o sol nascer.",
    "fr": "Il a plu toute la nuit. Nous sommes restés dans la vieille maison et nous avons raconté des histoires.",
    "de": "Es hat die ganze Nacht geregnet. Wir blieben in dem alten Haus und haben uns Geschichten erzählt.",
    "it": "Ha piovuto tutta la notte. Siamo rimasti nella vecchia casa e abbiamo raccontato delle storie.",
    "nl": "Het heeft de hele nacht geregend. We bleven in het oude huis en vertelden elkaar verhalen over de zee.",
    "sv": "Det regnade hela natten. Vi stannade i det gamla huset och berättade historier för varandra.",
    "pl": "Padało przez całą noc. Zostaliśmy w starym domu i opowiadaliśmy sobie historie do rana.",
    "cs": "Celou noc pršelo. Zůstali jsme ve starém domě a vyprávěli jsme si příběhy až do rána.",
    "ro": "A plouat toată noaptea. Am rămas în casa veche și ne-am spus povești până la răsărit.",
    "fi": "Koko yön satoi. Jäimme vanhaan taloon ja kerroimme toisillemme tarinoita, kun aurinko nousi.",
    "tr": "Bütün gece yağmur yağdı. Eski evde kaldık ve güneş doğana kadar birbirimize hikâyeler anlattık.",
    "id": "Hujan turun sepanjang malam. Kami tinggal di rumah tua itu dan bercerita sampai matahari terbit.",
    "vi": "Trời mưa suốt đêm. Chúng tôi ở lại trong ngôi nhà cũ và kể chuyện cho nhau nghe đến sáng.",
    "sw": "Mvua ilinyesha usiku wote. Tulikaa katika nyumba ya zamani na kusimuliana hadithi hadi asubuhi.",
    "ru": "Всю ночь шёл дождь. Мы остались в старом доме и рассказывали друг другу истории до утра.",
    "uk": "Усю ніч ішов дощ. Ми залишилися у старому будинку й розповідали одне одному історії до ранку.",
    "bg": "Цяла нощ валя дъжд. Останахме в старата къща и си разказвахме истории до сутринта.",
    "ar": "أمطرت السماء طوال الليل. بقينا في البيت القديم وحكينا القصص إلى أن أشرقت الشمس.",
    "fa": "تمام شب باران بارید. ما در خانه قدیمی ماندیم و تا صبح برای هم داستان گفتیم.",
    "ur": "ساری رات بارش ہوتی رہی۔ ہم پرانے گھر میں رہے اور صبح تک ایک دوسرے کو کہانیاں سناتے رہے۔",
    "hi": "सारी रात बारिश हुई। हम पुराने घर में रहे और सुबह तक एक दूसरे को कहानियाँ सुनाते रहे।",
    "mr": "रात्रभर पाऊस पडत होता. आम्ही जुन्या घरात राहिलो आणि सकाळपर्यंत गोष्टी सांगत होतो. ते छान आहे.",
    "ne": "रातभर पानी पर्यो। हामी पुरानो घरमा बस्यौं र बिहानसम्म कथा सुनायौं। यो धेरै राम्रो छ।",
    "ja": "一晩中雨が降りました。私たちは古い家に残り、朝まで物語を話しました。",
    "zh": "下了一整夜的雨。我们待在老房子里，互相讲故事，直到天亮。",
    "ko": "밤새 비가 내렸습니다. 우리는 오래된 집에 머물며 아침까지 이야기를 나눴습니다.",
    "el": "Έβρεχε όλη τη νύχτα. Μείναμε στο παλιό σπίτι και λέγαμε ιστορίες μέχρι το πρωί.",
    "he": "ירד גשם כל הלילה. נשארנו בבית הישן וסיפרנו סיפורים עד הבוקר.",
    "bn": "সারা রাত বৃষ্টি হয়েছিল। আমরা পুরানো বাড়িতে ছিলাম এবং সকাল পর্যন্ত গল্প করেছি।",
    "pa": "ਸਾਰੀ ਰਾਤ ਮੀਂਹ ਪਿਆ। ਅਸੀਂ ਪੁਰਾਣੇ ਘਰ ਵਿੱਚ ਰਹੇ ਅਤੇ ਸਵੇਰ ਤੱਕ ਕਹਾਣੀਆਂ ਸੁਣਾਈਆਂ।",
    "gu": "આખી રાત વરસાદ પડ્યો. અમે જૂના ઘરમાં રહ્યા અને સવાર સુધી વાર્તાઓ કહી.",
    "ta": "இரவு முழுவதும் மழை பெய்தது. நாங்கள் பழைய வீட்டில் தங்கி கதைகள் சொன்னோம்.",
    "te": "రాత్రంతా వర్షం కురిసింది. మేము పాత ఇంట్లో ఉండి కథలు చెప్పుకున్నాము.",
    "kn": "ರಾತ್ರಿಯಿಡೀ ಮಳೆ ಸುರಿಯಿತು. ನಾವು ಹಳೆಯ ಮನೆಯಲ್ಲಿ ಉಳಿದು ಕಥೆಗಳನ್ನು ಹೇಳಿದೆವು.",
    "ml": "രാത്രി മുഴുവൻ മഴ പെയ്തു. ഞങ്ങൾ പഴയ വീട്ടിൽ താമസിച്ച് കഥകൾ പറഞ്ഞു.",
    "th": "ฝนตกตลอดทั้งคืน เราอยู่ในบ้านเก่าและเล่านิทานให้กันฟังจนถึงเช้า",
}


def test_every_language_has_a_text() -> None:
    assert TEXTS.keys() == LANGUAGES.keys()


@pytest.mark.parametrize("language", TEXTS)
def test_a_text_is_in_its_language_and_in_no_other(language: str) -> None:
    assert [other for other in LANGUAGES if is_in(TEXTS[language], other)] == [language]


CASED = [name for name, profile in LANGUAGES.items() if profile.script in ("latin", "cyrillic", "greek") and name != "tr"]
"""Turkish has capitals of its own, which upper() does not know."""


@pytest.mark.parametrize("language", CASED)
def test_capitals_hide_no_language(language: str) -> None:
    assert is_in(TEXTS[language].upper(), language)


@pytest.mark.parametrize("text", ["", " \n", "1234 5678", "?!", "brrf zzyx qwrt plok", "🙂🙂"])
def test_noise_is_in_no_language(text: str) -> None:
    assert not any(is_in(text, language) for language in LANGUAGES)


def test_noise_around_a_common_word_stays_noise() -> None:
    assert not is_in("qwrt zzyx brrf plok mnbv trew gfds hjkl the vbnm yuiop", "en")


def test_a_foreign_name_changes_nothing() -> None:
    assert is_in("We met Владимир in the old house and he told us about the sea.", "en")


def test_borrowed_words_in_latin_letters_change_nothing() -> None:
    assert is_in("我用 Python 和 PyTorch 训练语言模型。", "zh")
    assert is_in("Python と PyTorch で言語モデルを訓練します。", "ja")


def test_a_region_does_not_matter() -> None:
    assert is_in(TEXTS["zh"], "zh-cn")
    assert is_in(TEXTS["pt"], "pt-BR")
