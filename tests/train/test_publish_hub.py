"""What goes wrong on the way to the Hub: one line each, and the Hub holds what it held, or the whole."""

import re
from pathlib import Path

import pytest
from huggingface_hub import HfApi

from tests.train.hub_server import READER, START, TOKEN, Fault, Hub, Repo
from tests.train.publishing import EVERYTHING, REPO, config
from train.publish import publish

WHOLE = {*EVERYTHING, *START}
COMMIT = f"^POST /api/models/{REPO}/commit"
BATCH = "^POST .*objects/batch"


def refusal(run: Path, hub: Hub, **changes: object) -> str:
    """Return the line by which publishing ends."""
    with pytest.raises(ValueError, match=r".") as caught:
        publish(config(run, **changes), HfApi())
    line = str(caught.value)
    assert "\n" not in line
    assert TOKEN not in line
    return line


def standing(hub: Hub, private: bool = True) -> Repo:
    """Return a repository that stood before, with a file of its own."""
    repo = hub.repos[REPO] = Repo(private)
    repo.commit({**START, "mine.txt": b"mine"})
    return repo


def test_an_update_is_one_commit_and_keeps_what_is_not_ours(run: Path, hub: Hub) -> None:
    repo = standing(hub)
    repo.commit({**repo.files, "report.md": b"old", "plots/old.png": b"old", "plans/x.md": b"mine"})
    before = len(repo.commits)
    (run / "report.md").unlink()
    publish(config(run), HfApi())
    assert len(repo.commits) == before + 1
    assert set(repo.files) == (WHOLE - {"report.md"}) | {"mine.txt", "plans/x.md"}


@pytest.mark.parametrize(("where", "how"), [(BATCH, 503), (COMMIT, "cut")])
def test_a_connection_lost_for_good_leaves_no_repository_of_ours(
    run: Path, hub: Hub, where: str, how: str | int
) -> None:
    hub.faults = [Fault(where, how)]
    line = refusal(run, hub)
    assert line.startswith(f"{REPO}: uploading broke off" if how == "cut" else f"{REPO}: the Hub answered 503 while")
    assert hub.repos == {}


def test_a_connection_lost_leaves_a_repository_as_it_was_and_another_call_goes_on(run: Path, hub: Hub) -> None:
    repo = standing(hub)
    before = repo.head
    hub.faults = [Fault(COMMIT, "cut")]
    assert refusal(run, hub).endswith("check the connection and try again")
    assert list(repo.commits) == [repo.head] == [before]
    sent = sorted(hub.received)
    assert len(sent) == 1, "the head"
    hub.faults = []
    publish(config(run), HfApi())
    assert sorted(hub.received) == sent, "no large file is sent twice"
    assert set(repo.files) == WHOLE | {"mine.txt"}


def test_someone_elses_commit_is_not_overwritten(run: Path, hub: Hub) -> None:
    repo = standing(hub)

    def meddle(request: str) -> None:
        if re.match(BATCH, request):
            repo.commit({**repo.files, "theirs.txt": b"theirs"})

    hub.watch = meddle
    assert "A commit has happened since" in refusal(run, hub)
    assert set(repo.files) == {*START, "mine.txt", "theirs.txt"}


@pytest.mark.parametrize(
    ("token", "told"),
    [
        (READER, r"the Hub refused creating the repository \(403\).* the token lacks the right"),
        ("hf_" + "d4" * 17, r"the Hub refused creating the repository \(40[13]\)"),
    ],
)
def test_a_token_without_rights_changes_nothing(
    run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, token: str, told: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    line = refusal(run, hub)
    assert re.search(told, line)
    assert token not in line
    assert (hub.repos, hub.blobs) == ({}, {})


def test_a_name_of_someone_else_is_refused(run: Path, hub: Hub) -> None:
    theirs = hub.repos["you/taken"] = Repo(private=False)
    theirs.commit(dict(START))
    assert "you/taken: the repository is public; make it private" in refusal(run, hub, repo="you/taken")
    line = refusal(run, hub, repo="you/taken", private=False)
    assert re.search(r"the Hub refused uploading \(403\)", line)
    assert r"the Hub refused creating the repository (403)" in refusal(run, hub, repo="you/new")
    assert set(hub.repos) == {"you/taken"}
    assert (theirs.files, hub.blobs) == (START, {})


def test_a_tag_that_exists_is_refused_before_anything_is_sent(run: Path, hub: Hub) -> None:
    repo = standing(hub)
    repo.tags["v1"] = repo.head
    assert f"{REPO}: has a tag v1 already, nothing was uploaded; give another tag=…" in refusal(run, hub, tag="v1")
    assert (len(repo.commits), hub.blobs) == (1, {})


def test_a_download_that_differs_says_what_to_do(run: Path, hub: Hub) -> None:
    repo = standing(hub)
    before = repo.head
    hub.damage = "model.safetensors"
    line = refusal(run, hub, tag="v1")
    assert f"{REPO}: model.safetensors came back different from what was uploaded; {REPO} is now at" in line
    assert f"{repo.head}, and was at {before}: publish again, or take it down on the Hub" in line
    assert repo.tags == {}, "nothing is tagged that was not verified"
