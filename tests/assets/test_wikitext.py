from __future__ import annotations

import pytest

from mla_convert.assets.wikitext import clean_wikitext


@pytest.mark.parametrize(
    ("source", "prose"),
    [
        ("'''Autism''' is a ''disorder''.", "Autism is a disorder."),
        ("'''''Both''''' here", "Both here"),
        ("In ''Atlas Shrugged'''s plot", "In Atlas Shrugged's plot"),
        ("the '''dog'''s tail", "the dogs tail"),
        ("a [[neurodevelopmental disorder]].", "a neurodevelopmental disorder."),
        ("[[nerve cell]]s and [[Human brain|brain]]s", "nerve cells and brains"),
        ("[[Category:Psychiatry]]text[[de:Autismus]]", "text"),
        ("see [[:Category:Maps]] and [[wikt:bondman|bond-man's]]", "see Category:Maps and bond-man's"),
        ("[[File:a.jpg|thumb|A [[cat]] and a [http://x.org dog]]]Text", "Text"),
        ("[[Image:b.png|right]]\nText", "Text"),
        ("a [http://example.org/x label here] b [https://example.org] c", "a label here b c"),
        ("a [http://example.org the [[cat|dog]] page].", "a the dog page."),
        ("said [quoted aside] or [/a/ sound] so", "said [quoted aside] or [/a/ sound] so"),
    ],
)
def test_emphasis_and_links(source: str, prose: str) -> None:
    assert clean_wikitext(source) == prose


@pytest.mark.parametrize(
    ("source", "prose"),
    [
        ("A{{citation needed|date=May 2015}} b.", "A b."),
        ("{{Infobox\n| name = {{PAGENAME}}\n| link = [[x|y]]\n}}\nText", "Text"),
        ("{{quote|Long [[live|lived]] text.|Author}}", "Long lived text."),
        ("{{quote|text=Named = text|source=x}}", "Named = text"),
        ("about {{convert|1300|mi|km}} away", "about 1300 mi away"),
        ("{{convert|5|to|10|km|mi|abbr=on}} wide", "5 to 10 km wide"),
        ("from {{lang|grc|ἀναρχία}} and {{lang-ru|Али́са}}", "from ἀναρχία and Али́са"),
        ("{{As of|2010}}, and {{as of|2014|lc=y}}", "As of 2010, and as of 2014"),
        ("{{chem|H|2|O}} is wet", "H2O is wet"),
        ("one{{spaced ndash}}two {{!}} three", "one – two | three"),
        ("left [[open {{cite|x}} right", "left [[open right"),
        ("a ({{IPAc-en|æ|l}}; born 1900) b ({{respell|X}}) c", "a (born 1900) b c"),
    ],
)
def test_templates(source: str, prose: str) -> None:
    assert clean_wikitext(source) == prose


@pytest.mark.parametrize(
    ("source", "prose"),
    [
        ("A.<ref name=x>{{cite web|title=t}}</ref> B.<ref name=x /> C.<ref name='a b'/>", "A. B. C."),
        ("A <!-- hidden\n''comment'' --> B", "A B"),
        ("A <!-- never closed", "A"),
        ("where <math>E = {{mc}}^2</math> holds", "where holds"),
        ("H<sub>2</sub>O is <small>tiny</small><br />new", "H2O is tiny new"),
        ("5 < 6 and 7 > 3, size <500g", "5 < 6 and 7 > 3, size <500g"),
        ("<gallery>\nFile:a.jpg|A\n</gallery>Text", "Text"),
        ("{| class=x\n! head\n|-\n| a || b\n{| \n| inner\n|}\n|}\nText", "Text"),
        ("AT&amp;T &ndash; a&nbsp;b &lt;ref&gt;", "AT&T – a b <ref>"),
        ("<nowiki>[[not a link]] ''x'' {{y}}</nowiki>", "[[not a link]] ''x'' {{y}}"),
        ("__NOTOC__Text", "Text"),
    ],
)
def test_elements_tables_and_entities(source: str, prose: str) -> None:
    assert clean_wikitext(source) == prose


def test_headings_and_lists_become_plain_lines() -> None:
    source = "Start.\n\n== History ==\n=== Early ===\nOld.\n* one\n** two\n# three\n:indented\n----\nEnd."

    assert clean_wikitext(source) == "Start.\n\nHistory\n\nEarly\n\nOld.\none\ntwo\nthree\nindented\nEnd."


def test_reference_sections_go_with_their_subsections_and_the_next_section_stays() -> None:
    notes = "==Notes==\n* a note\n===Books===\n* a book\n"
    source = f"Text.\n{notes}==Legacy==\nKept.\n==External links==\n* [http://x y]"

    assert clean_wikitext(source) == "Text.\n\nLegacy\n\nKept."


def test_a_heading_over_nothing_is_left_out() -> None:
    assert clean_wikitext("A.\n==Empty==\n{{table}}\n==Full==\nB.\n==Last==\n") == "A.\n\nFull\n\nB."


def test_paragraphs_stay_apart_by_one_empty_line() -> None:
    assert clean_wikitext("\n\nOne  two .\n\n\n{{x}}\n\nThree.\n") == "One two.\n\nThree."


def test_nothing_but_markup_is_empty() -> None:
    assert clean_wikitext("{{x}}\n[[Category:A]]\n<!-- -->") == ""
