"""The corpus: every document whole and once, the loss where the target wrote, the split by content, batches by epoch.

Oracles read the source files themselves and pack with plain lists. T is 37 tokens a row, the vocabulary 311.
"""

import gzip
import hashlib
import json
import random
import types

import numpy as np
import pytest

from drafter import corpus, manifest
from drafter.documents import Source, records
from kernels.errors import UserError

LENGTH, VOCABULARY, EOS = 37, 311, 2
IDENTITY = {"source": "tiny", "fingerprint": "f1", "tokenizer_sha256": "t1", "template_sha256": "c1", "dtype": "x"}


def encode(text, add_special_tokens=True):
    """A tokenizer that anyone can check: one id a character, 1 in front of a whole text."""
    return [1] * add_special_tokens + [ord(character) for character in text]


@pytest.fixture
def target():
    """What the corpus asks of a target; a chat is encoded as role and content, then `>`."""
    return types.SimpleNamespace(
        vocab_size=VOCABULARY,
        identity=lambda: IDENTITY,
        tokenizer=types.SimpleNamespace(encode=encode, eos_token_id=EOS),
        encode=lambda messages: encode("".join(m["role"][0] + m["content"] for m in messages) + ">", False),
    )


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Keep `datasets` from writing into the user's cache."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets-cache")


def write_answers(path, rows):
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def draw_rows(count, seed, longest=50):
    """Random answer rows, some of them longer than a row of the corpus."""
    draw = random.Random(seed)
    ids = lambda most: [draw.randrange(3, VOCABULARY) for _ in range(draw.randint(1, most))]
    return [{"id": f"{seed}-{n}", "prompt_tokens": ids(9), "answer_tokens": ids(longest)} for n in range(count)]


def read(sources, target, validation=0.0, **options):
    return corpus.rows(sources, target, length=LENGTH, seed=4, validation=validation, **options)


def unpack(rows):
    """{document id: (tokens, loss mask)} of packed rows, by walking every cell."""
    found = {}
    for r in range(rows.tokens.shape[0]):
        for t in range(rows.tokens.shape[1]):
            number = int(rows.documents[r, t])
            if number == 0:
                assert rows.tokens[r, t] == 0
                assert not rows.loss_mask[r, t]
                continue
            place, tokens, mask = found.setdefault(number, ([], [], []))
            place.append((r, t))
            tokens.append(int(rows.tokens[r, t]))
            mask.append(bool(rows.loss_mask[r, t]))
    for place, _, _ in found.values():  # in one row, one token after the other
        assert place == [(place[0][0], place[0][1] + n) for n in range(len(place))]
    return {number: (tokens, mask) for number, (_, tokens, mask) in found.items()}


@pytest.mark.parametrize("seed", range(12))
def test_every_document_lies_whole_in_one_row_and_the_loss_covers_its_answer(tmp_path, target, seed):
    rows = draw_rows(5 + 17 * seed, seed)
    found = read([Source(str(write_answers(tmp_path / "a.jsonl", rows)))], target, validation=0.1 * (seed % 3))
    expected = []
    for row in rows:
        tokens = (row["prompt_tokens"] + row["answer_tokens"])[:LENGTH]
        expected.append((tokens, [n >= len(row["prompt_tokens"]) for n in range(len(tokens))]))
    train, validation = unpack(found.train), unpack(found.validation)
    assert train.keys().isdisjoint(validation)
    assert sorted((train | validation).values()) == sorted(expected)
    assert (train | validation).keys() == set(range(1, len(rows) + 1))
    assert found.counts["cut"] == sum(len(row["prompt_tokens"] + row["answer_tokens"]) > LENGTH for row in rows)
    for side, documents in ((found.train, train), (found.validation, validation)):
        assert side.tokens.dtype == side.documents.dtype == np.int32
        assert side.loss_mask.dtype == bool
        assert side.counts == {
            "documents": len(documents),
            "rows": len(side),
            "tokens": sum(len(tokens) for tokens, _ in documents.values()),
            "answer_tokens": sum(sum(mask) for _, mask in documents.values()),
        }


def plain_first_fit(lengths, capacity):
    """Rows as lists of lengths: each length goes to the first list that stays within capacity."""
    rows = []
    chosen = []
    for length in lengths:
        for number, row in enumerate(rows):
            if sum(row) + length <= capacity:
                row.append(length)
                chosen.append(number)
                break
        else:
            rows.append([length])
            chosen.append(len(rows) - 1)
    return chosen


@pytest.mark.parametrize("seed", range(20))
def test_first_fit_chooses_the_rows_that_a_plain_loop_does(seed):
    draw = random.Random(seed)
    lengths = [draw.randint(1, LENGTH) for _ in range(draw.randint(0, 80))]
    if seed % 2:
        lengths.sort(reverse=True)
    assert corpus.first_fit(lengths, LENGTH) == plain_first_fit(lengths, LENGTH)


def test_the_longest_document_is_packed_first(tmp_path, target):
    sizes = [7, 30, 20, 17, 6]  # in the order of the file these take three rows, longest first two
    rows = [{"id": str(size), "prompt_tokens": [], "answer_tokens": [9] * size} for size in sizes]
    found = read([Source(str(write_answers(tmp_path / "a.jsonl", rows)))], target).train
    packed = [sorted(np.bincount(row)[1:][np.bincount(row)[1:] > 0]) for row in found.documents]
    assert packed == [[7, 30], [17, 20], [6]]


def test_a_prompt_that_fills_the_row_is_left_out_and_counted(tmp_path, target):
    rows = [
        {"id": "a", "prompt_tokens": [5] * LENGTH, "answer_tokens": [6, EOS]},
        {"id": "b", "prompt_tokens": [5] * (LENGTH - 1), "answer_tokens": [6, EOS]},
    ]
    found = read([Source(str(write_answers(tmp_path / "a.jsonl", rows)))], target)
    assert found.counts == {"cut": 1, "left_out": 1, "split": 0}
    assert unpack(found.train) == {1: ([5] * (LENGTH - 1) + [6], [False] * (LENGTH - 1) + [True])}


@pytest.mark.parametrize("size", [2, LENGTH - 1, LENGTH, LENGTH + 1, LENGTH + 2, 3 * LENGTH, 3 * LENGTH + 1])
def test_plain_text_becomes_consecutive_documents_under_the_loss(tmp_path, target, size):
    (tmp_path / "text.txt").write_text("".join(chr(97 + n % 26) for n in range(size - 1)))
    found = unpack(read([Source(str(tmp_path / "text.txt"), "text")], target).train)
    tokens = [token for number in sorted(found) for token in found[number][0]]
    whole = encode((tmp_path / "text.txt").read_text())
    assert tokens == (whole[:-1] if size % LENGTH == 1 else whole)  # a last piece of one token has nothing to predict
    assert all(all(mask) for _, mask in found.values())
    assert all(len(tokens) == LENGTH for number, (tokens, _) in found.items() if number < len(found))


# Datasets.


def test_a_dataset_of_conversations_puts_the_last_answer_under_the_loss(tmp_path, target):
    talk = [("user", "hi"), ("assistant", "ho"), ("user", "so?"), ("assistant", "no")]
    messages = [{"role": role, "content": content} for role, content in talk]
    write_answers(tmp_path / "chat.jsonl", [{"messages": messages}])
    found = unpack(read([Source(str(tmp_path / "chat.jsonl"), "dataset", column="messages")], target).train)
    prompt, answer = [ord(c) for c in "uhiahouso?>"], [ord("n"), ord("o"), EOS]
    assert found == {1: (prompt + answer, [False] * len(prompt) + [True] * 3)}


@pytest.mark.parametrize("folder", [False, True])
def test_a_dataset_of_text_is_read_by_its_column_and_split(tmp_path, target, folder):
    path = write_answers(tmp_path / "train.jsonl", [{"body": word, "n": 3} for word in ("one", "three", "seven")])
    name = str(tmp_path if folder else path)
    found = read([Source(name, "dataset", split="train[1:]", column="body")], target)
    assert unpack(found.train) == {n: (encode(w), [True] * (1 + len(w))) for n, w in enumerate(("three", "seven"), 1)}
    assert found.train.sources[0]["name"] == f"{name}[train[1:]]"


def test_a_dataset_s_digest_follows_its_column(tmp_path, target):
    def digest(texts):
        path = write_answers(tmp_path / f"{'-'.join(texts)}.jsonl", [{"text": text} for text in texts])
        return read([Source(str(path), "dataset")], target).train.sources[0]["sha256"]

    assert digest(["one", "two"]) != digest(["one", "too"]) != digest(["onet", "oo"])


# The split.


def side_of(found, rows):
    """{id: "train" or "validation"} by looking for each row's tokens."""
    sides = {}
    for name in ("train", "validation"):
        held = [tokens for tokens, _ in unpack(getattr(found, name)).values()]
        sides |= {row["id"]: name for row in rows if (row["prompt_tokens"] + row["answer_tokens"])[:LENGTH] in held}
    return sides


def test_neither_order_nor_seed_nor_more_documents_move_one_across_the_split(tmp_path, target):
    rows, more = draw_rows(60, 1, 20), draw_rows(90, 2, 20)
    a, b = write_answers(tmp_path / "a.jsonl", rows), write_answers(tmp_path / "b.jsonl", more)
    back = write_answers(tmp_path / "back.jsonl", rows[::-1])
    first = side_of(read([Source(str(a))], target, 0.3), rows)
    assert set(first.values()) == {"train", "validation"}
    assert side_of(read([Source(str(back))], target, 0.3), rows) == first
    assert side_of(read([Source(str(b)), Source(str(a))], target, 0.3), rows) == first
    other_seed = corpus.rows([Source(str(a))], target, length=LENGTH, seed=5, validation=0.3)
    assert side_of(other_seed, rows) == first


def test_answers_to_one_prompt_stay_on_one_side(tmp_path, target):
    rows = [row | {"id": row["id"].split("-")[1]} for seed in (1, 2) for row in draw_rows(40, seed, 20)]
    found = read([Source(str(write_answers(tmp_path / "a.jsonl", rows)))], target, 0.4)
    tokens = {name: [t for t, _ in unpack(getattr(found, name)).values()] for name in ("train", "validation")}
    for first, second in zip(rows[:40], rows[40:], strict=True):
        places = [
            name
            for row in (first, second)
            for name in tokens
            if (row["prompt_tokens"] + row["answer_tokens"])[:LENGTH] in tokens[name]
        ]
        assert len(places) == 2
        assert places[0] == places[1]


def test_the_share_held_out_is_the_share_asked_for():
    keys = {f"key {n}" for n in range(4000)}
    held = corpus.held_out(keys, 0.05)
    assert 0.035 < len(held) / len(keys) < 0.065  # four standard deviations of a fair draw are 0.014
    assert corpus.held_out(keys, 0.0) == set()


@pytest.mark.parametrize("share", [0.0001, 0.9999])
def test_neither_side_of_a_small_corpus_is_empty(share):
    assert 1 <= len(corpus.held_out({"a", "b", "c"}, share)) <= 2


def test_fewer_documents_are_a_subset_drawn_by_content(tmp_path, target):
    rows = draw_rows(50, 3, 20)
    a, back = write_answers(tmp_path / "a.jsonl", rows), write_answers(tmp_path / "b.jsonl", rows[::-1])
    few = [sorted(unpack(read([Source(str(p))], target, max_documents=11).train).values()) for p in (a, back)]
    more = unpack(read([Source(str(a))], target, max_documents=30).train).values()
    assert len(few[0]) == 11
    assert few[0] == few[1]
    assert all(document in more for document in few[0])


# Digests and batches.


def test_the_digests_are_those_of_the_file_and_of_the_arrays(tmp_path, target):
    rows = draw_rows(20, 6)
    path = write_answers(tmp_path / "a.jsonl", rows)
    first, again = (read([Source(str(path))], target) for _ in range(2))
    assert first.train.sha256 == again.train.sha256
    assert first.train.sources[0]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    rows[7]["answer_tokens"][0] ^= 1
    write_answers(path, rows)
    assert read([Source(str(path))], target).train.sha256 != first.train.sha256


def test_a_compressed_file_reads_like_a_plain_one(tmp_path, target):
    path = write_answers(tmp_path / "a.jsonl", draw_rows(20, 6))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    plain, packed = (read([Source(str(tmp_path / name))], target) for name in ("a.jsonl", "a.jsonl.gz"))
    assert plain.train.sha256 == packed.train.sha256


@pytest.fixture
def packed(tmp_path, target):
    """23 rows or so."""
    return read([Source(str(write_answers(tmp_path / "a.jsonl", draw_rows(40, 9))))], target).train


def order(rows, *args, **options):
    """The rows of an epoch's batches, found by their content."""
    content = {row.tobytes(): n for n, row in enumerate(rows.documents)}
    return [[content[row.tobytes()] for row in batch.documents] for _, batch in corpus.batches(rows, *args, **options)]


def test_an_epoch_shows_every_row_once_in_an_order_of_its_own(packed):
    epochs = [order(packed, 1, seed=3, epoch=epoch) for epoch in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == [[n] for n in range(len(packed))]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert order(packed, 1, seed=4, epoch=0) != epochs[0] == order(packed, 1, seed=3, epoch=0)


def test_an_epoch_can_be_entered_in_the_middle(packed):
    whole = list(corpus.batches(packed, 4, seed=3, epoch=5))
    part = list(corpus.batches(packed, 4, seed=3, epoch=5, start=2))
    assert [index for index, _ in part] == [index for index, _ in whole][2:]
    for (_, one), (_, other) in zip(part, whole[2:], strict=True):
        for field in ("tokens", "loss_mask", "documents"):
            np.testing.assert_array_equal(getattr(one, field), getattr(other, field))


def test_all_training_batches_have_the_size_asked_for(packed):
    assert len(packed) % 4 != 0
    sizes = [len(batch) for batch in order(packed, 4, seed=3, epoch=0)]
    assert sizes == [4] * (len(packed) // 4)
    assert [len(batch) for batch in order(packed, 1000, seed=3, epoch=0)] == [len(packed)]


def test_validation_sees_every_row_in_order(packed):
    seen = np.concatenate([batch.tokens for batch in corpus.in_order(packed, 5)])
    np.testing.assert_array_equal(seen, packed.tokens)


# Refusals.

GOOD = '{"id": "a", "prompt_tokens": [5], "answer_tokens": [6, 2]}\n'


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "empty file"),
        ("\n\n", "empty file"),
        (GOOD + '{"id": "b", "prompt_to', "line 2: not JSON"),
        (GOOD + "[1, 2]\n", "line 2: found list, expected a JSON object"),
        (GOOD + '{"prompt": "how?"}\n', "line 2: prompt_tokens is no list of token ids"),
        (GOOD + '{"prompt_tokens": [5], "answer_tokens": "six"}\n', "line 2: answer_tokens is no list of token ids"),
        (GOOD + '{"prompt_tokens": [5], "answer_tokens": [6.5]}\n', "line 2: answer_tokens is no list of token ids"),
        (GOOD + '{"prompt_tokens": [5], "answer_tokens": []}\n', "line 2: no answer tokens"),
        (GOOD + '{"prompt_tokens": [5], "answer_tokens": [311]}\n', "line 2: token 311 found, expected 0 to 310"),
        (GOOD + '{"prompt_tokens": [-4], "answer_tokens": [7]}\n', "line 2: token -4 found, expected 0 to 310"),
    ],
)
def test_a_damaged_answer_file_is_refused_with_its_line(tmp_path, target, content, named):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(UserError, match=rf"a\.jsonl.*{named}"):
        read([Source(str(tmp_path / "a.jsonl"))], target)


TORN = [gzip.compress(GOOD.encode() * 99)[:-20], b"no gzip at all", b"\x1f\x8b" + b"\0" * 40]


@pytest.mark.parametrize("content", TORN, ids=["cut", "text", "zeros"])
def test_a_torn_compressed_file_is_refused(tmp_path, content):
    (tmp_path / "a.jsonl.gz").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.jsonl\.gz: unreadable after line"):
        list(records(tmp_path / "a.jsonl.gz"))


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (Source("none.jsonl"), r"none\.jsonl: not found; expected answers"),
        (Source("none.txt", "text"), r"none\.txt: not found; expected a text file"),
        (Source("empty.txt", "text"), r"empty\.txt: empty file"),
        (Source("latin.txt", "text"), r"latin\.txt: not UTF-8"),
        (Source("good.jsonl", "dataset", column="body"), r"row 0: no text in 'body' \(found answer_tokens, id"),
        (Source("good.jsonl", "dataset", split="train[7:x]"), r"dataset good\.jsonl: cannot be loaded"),
        (Source("nobody/nothing", "dataset"), "dataset nobody/nothing: cannot be loaded"),
        (Source("chat.jsonl", "dataset", column="messages"), "row 0: no answer in its last message"),
        (Source("good.jsonl", "tokens"), "unknown kind 'tokens'"),
        (Source("."), r"manifest\.json: not found"),
    ],
)
def test_a_source_that_cannot_be_read_is_named(tmp_path, target, monkeypatch, source, named):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.jsonl").write_text(GOOD)
    (tmp_path / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match=named):
        read([source], target)


@pytest.mark.parametrize(("length", "validation"), [(1, 0.1), (LENGTH, -0.1), (LENGTH, 1.0)])
def test_rows_and_splits_that_cannot_be_are_refused(target, length, validation):
    with pytest.raises(UserError, match=f"row length {length}, validation {validation}"):
        corpus.rows([], target, length=length, seed=0, validation=validation)


def test_a_corpus_of_prompts_alone_is_refused(tmp_path, target):
    row = {"id": "a", "prompt_tokens": [5] * LENGTH, "answer_tokens": [6]}
    with pytest.raises(UserError, match=rf"a\.jsonl: no answer tokens within {LENGTH} tokens"):
        read([Source(str(write_answers(tmp_path / "a.jsonl", [row])))], target)


@pytest.fixture
def synthesis(tmp_path):
    """A synthesis folder with a manifest."""
    folder = tmp_path / "answers"
    folder.mkdir()
    (folder / "answers.jsonl.gz").write_bytes(gzip.compress(GOOD.encode() * 9))
    (folder / "settings.json").write_text("{}")
    manifest.write(folder, kind="synthesis", target=IDENTITY)
    return folder


@pytest.mark.parametrize("file", [False, True])
def test_answers_of_another_target_are_refused_naming_both_digests(synthesis, target, file):
    source = Source(str(synthesis / "answers.jsonl.gz" if file else synthesis))
    assert read([source], target).train.counts["documents"] == 9
    target.identity = lambda: IDENTITY | {"fingerprint": "f2"}
    with pytest.raises(UserError, match=r"answers: made with the target fingerprint f1 \(tiny\), .* is f2"):
        read([source], target)
    assert read([source], target, allow_mismatch=True).train.counts["documents"] == 9


def test_a_changed_byte_of_a_synthesis_is_refused(synthesis, target):
    (synthesis / "settings.json").write_text("[]")
    with pytest.raises(UserError, match=r"settings\.json: changed file"):
        read([Source(str(synthesis))], target)


def test_a_folder_without_answers_is_refused(tmp_path, target):
    (tmp_path / "model.safetensors").write_text("x")
    manifest.write(tmp_path, kind="checkpoint", target=IDENTITY)
    with pytest.raises(UserError, match="found a folder of kind 'checkpoint', expected one with answers"):
        read([Source(str(tmp_path))], target)
