from __future__ import annotations

import base64
import io
import re

import numpy as np
import pytest
import torch
from PIL import Image

import vitkit
from tests.server.conftest import NAMES, files, photo, tiny
from vitkit.data import decode, preprocess
from vitkit.errors import BadImage, ConfigError
from vitkit.evaluation import predict
from vitkit.server.explaining import KINDS, PICTURES
from vitkit.server.settings import Settings


def test_predict_is_what_python_says(client, service) -> None:
    images = [photo(i, format=kind) for i, kind in enumerate(("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM"))]
    answer = client.post("/v1/predict?top=3", files=files(*images))
    assert answer.status_code == 200
    results = answer.json()["results"]
    for said, expected in zip(results, predict(service.model, images, top=3), strict=True):
        assert [one["class"] for one in said["top"]] == [guess.name for guess in expected.guesses]
        assert [one["index"] for one in said["top"]] == [NAMES.index(guess.name) for guess in expected.guesses]
        assert [one["p"] for one in said["top"]] == pytest.approx([g.probability for g in expected.guesses], abs=1e-6)
    assert len({result["top"][0]["p"] for result in results}) > 3  # the model does tell them apart
    assert [result["name"] for result in results] == [f"photo{i}.png" for i in range(7)]


def test_json_and_multipart_agree(client) -> None:
    raw = photo(3)
    text = base64.b64encode(raw).decode()
    ways = [
        client.post("/v1/predict", files=files(raw)),
        client.post("/v1/predict", json={"images": [{"name": "photo0.png", "data": text}]}),
        client.post(
            "/v1/predict", json={"images": [{"name": "C:\\a\\photo0.png", "data": f"data:image/png;base64,{text}"}]}
        ),
    ]
    assert [way.status_code for way in ways] == [200] * 3
    assert ways[0].json() == ways[1].json() == ways[2].json()


def test_all_classes_and_no_more(client) -> None:
    top = client.post("/v1/predict?top=100", files=files(photo())).json()["results"][0]["top"]
    assert len(top) == 5
    assert sum(one["p"] for one in top) == pytest.approx(1)
    assert [one["p"] for one in top] == sorted((one["p"] for one in top), reverse=True)


def test_embed_is_equation_4(client, service) -> None:
    raw = photo(1)
    answer = client.post("/v1/embed", files=files(raw)).json()
    x = preprocess(decode(raw), service.spec)[None]
    with torch.no_grad():
        y = service.model.features(x)[0]
    assert answer["width"] == 32
    assert torch.tensor(answer["results"][0]["embedding"]) == pytest.approx(y, abs=1e-5)


def test_explain_numbers_are_equation_6(client, service) -> None:
    raw = photo(2)
    x = preprocess(decode(raw), service.spec)[None]
    with torch.no_grad():
        A = service.model.attention(x, layers=1, heads=2, query=7)[1][0, 0, 0]
    said = client.post("/v1/explain?kind=attention&format=json&layer=1&head=2&query=7", files=files(raw)).json()
    assert (said["grid"], said["prefix_tokens"], said["shape"]) == ([4, 4], 1, [1, 1, 17])
    assert torch.tensor(said["values"][0][0]) == pytest.approx(A, abs=1e-5)
    whole = np.load(io.BytesIO(client.post("/v1/explain?kind=attention&format=npy", files=files(raw)).content))
    assert whole.shape == (2, 4, 17)
    assert whole.sum(-1) == pytest.approx(1, abs=1e-5)
    rolled = client.post("/v1/explain?kind=rollout&format=json", files=files(raw)).json()["values"]
    assert sum(rolled) == pytest.approx(1, abs=1e-4)
    shown = np.array(client.post("/v1/explain?kind=input&format=json", files=files(raw)).json()["values"])
    expected = np.array(Image.open(io.BytesIO(raw)).resize((32, 32), Image.Resampling.BILINEAR))
    assert np.abs(shown - expected.astype(int)).max() <= 1


def test_explain_gradient_explains_the_class_that_was_asked_for(client, service) -> None:
    from vitkit.explanations.attention import gradient_rollout

    raw = photo(2)
    x = preprocess(decode(raw), service.spec)[None]
    likely = client.post("/v1/predict", files=files(raw)).json()["results"][0]["top"][0]["index"]
    for query, target in (("", likely), ("&target=0", 0), ("&target=3", 3)):
        said = client.post(f"/v1/explain?kind=gradient&format=json{query}", files=files(raw)).json()["values"]
        assert said == pytest.approx(gradient_rollout(service.model, x, target)[0], rel=1e-3, abs=1e-6)


def test_an_overlay_of_attention_shows_the_last_layer_unless_told_otherwise(client) -> None:
    def overlay(query: str) -> bytes:
        return client.post(f"/v1/explain?kind=attention{query}", files=files(photo(2))).content

    assert overlay("") == overlay("&layer=1") == overlay("&layer=-1") != overlay("&layer=0")
    assert overlay("&head=0") != overlay("&head=1")
    assert overlay("&query=3") != overlay("&query=4")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_in_every_format(client, kind: str) -> None:
    for format, starts in {"png": b"\x89PNG", "npy": b"\x93NUMPY", "json": b"{"}.items():
        answer = client.post(f"/v1/explain?kind={kind}&format={format}", files=files(photo()))
        assert answer.status_code == 200, answer.text
        assert answer.content.startswith(starts)
    with Image.open(io.BytesIO(client.post(f"/v1/explain?kind={kind}", files=files(photo())).content)) as image:
        assert image.size == (32, 32)


@pytest.mark.parametrize("name", [name for name, plot in PICTURES.items() if vitkit.ViT in plot.models])
def test_every_picture_of_the_table(client, name: str) -> None:
    answer = client.post(f"/v1/picture?name={name}", files=files(photo()))
    assert answer.status_code == 200, answer.text
    with Image.open(io.BytesIO(answer.content)) as image:
        assert min(image.size) > 50


def test_pruned_heads_are_null(client_with) -> None:
    client = client_with(tiny(pruned_heads={0: [1]}))
    said = client.post("/v1/explain?kind=attention&format=json", files=files(photo())).json()["values"]
    assert said[0][1] == [None] * 17
    assert sum(said[1][1]) == pytest.approx(1, abs=1e-4)
    asked = client.post("/v1/explain?kind=attention&format=json&query=4", files=files(photo())).json()["values"]
    assert asked[0][1] == [None] * 17
    assert client.get("/v1/model").json()["heads"][0] == [0, 2, 3]
    gone = client.post("/v1/explain?kind=attention&layer=0&head=1", files=files(photo()))
    assert gone.status_code == 422
    assert "pruned" in gone.json()["error"]


@pytest.mark.parametrize(
    "changes",
    [
        {"pool": "mean", "class_token": False},
        {"num_register_tokens": 2},
        {"num_classes": 1000},
        {"num_classes": 2},
    ],
)
def test_other_models(client_with, changes: dict[str, object]) -> None:
    client = client_with(tiny(**changes))
    assert client.post("/v1/predict", files=files(photo())).status_code == 200
    for kind in KINDS:
        assert client.post(f"/v1/explain?kind={kind}", files=files(photo())).status_code == 200, kind
    if changes.get("num_classes") == 1000:
        assert client.get("/v1/model").json()["classes"][0] == "tench"


def test_a_model_without_a_head(client_with) -> None:
    client = client_with(tiny(num_classes=0))
    refused = client.post("/v1/predict", files=files(photo()))
    assert refused.status_code == 422
    assert "/v1/embed" in refused.json()["error"]
    assert client.post("/v1/embed", files=files(photo())).status_code == 200
    assert client.post("/v1/explain?kind=gradient", files=files(photo())).status_code == 422
    assert "predictions" not in client.get("/v1/model").json()["pictures"]


def test_card(client) -> None:
    card = client.get("/v1/model").json()
    assert card["classes"] == list(NAMES)
    assert card["sha256"] == "0" * 64
    assert card["input_spec"]["size"] == [32, 32]
    assert card["vitkit"] == vitkit.__version__
    assert (card["grid"], card["layers"], card["variant"]) == ([4, 4], 2, None)
    for path in card["samples"]:
        assert client.get(path).content.startswith(b"\xff\xd8")
        assert client.post("/v1/predict", files=files(client.get(path).content)).status_code == 200


def test_health_metrics_and_docs(client, service) -> None:
    assert client.get("/healthz").json() == {"status": "alive"}
    assert client.get("/readyz").json() == {"status": "ready"}
    client.post("/v1/predict", files=files(photo(), photo(1)))
    text = client.get("/metrics").text
    assert re.search(r'vitkit_requests_total{path="/v1/predict",status="200"} \d', text)
    assert 'vitkit_batch_size_count{work="predict"}' in text
    assert 'vitkit_images_waiting{work="predict"} 0.0' in text
    client.get("/a/path/of/an/attacker")
    assert "attacker" not in client.get("/metrics").text
    assert set(client.get("/openapi.json").json()["paths"]) == {
        "/v1/predict",
        "/v1/embed",
        "/v1/explain",
        "/v1/picture",
        "/v1/similar",
        "/v1/photos/{number}",
        "/v1/model",
        "/healthz",
        "/readyz",
        "/metrics",
    }
    service.stopping = True
    try:
        assert client.get("/readyz").status_code == 503
        assert client.post("/v1/predict", files=files(photo())).headers["connection"] == "close"
    finally:
        service.stopping = False


def test_metrics_count_every_request_and_image_once(client_with) -> None:
    client = client_with()
    for _ in range(3):
        assert client.post("/v1/predict", files=files(photo(), photo(1))).status_code == 200
    assert client.post("/v1/predict", files=files(b"broken")).status_code == 422
    client.post("/v1/embed", files=files(photo()))
    client.post("/v1/explain", files=files(photo()))
    counted = dict(line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if line[0] != "#")
    assert counted['vitkit_requests_total{path="/v1/predict",status="200"}'] == "3.0"
    assert counted['vitkit_requests_total{path="/v1/predict",status="422"}'] == "1.0"
    assert counted['vitkit_request_seconds_count{path="/v1/predict"}'] == "4.0"
    assert counted['vitkit_batch_size_sum{work="predict"}'] == "6.0"
    assert counted['vitkit_batch_size_count{work="predict"}'] == counted['vitkit_batch_seconds_count{work="predict"}']
    assert [counted[f'vitkit_batch_size_sum{{work="{work}"}}'] for work in ("embed", "explain")] == ["1.0", "1.0"]
    assert counted["vitkit_requests_in_progress"] == "1.0"  # the one that asks
    assert (client.app.accepted, client.app.answered) == (7, 7)


def test_answers_are_not_cached(client) -> None:
    assert client.get("/v1/model").headers["cache-control"] == "no-store"
    assert client.post("/v1/predict", files=files(photo())).headers["cache-control"] == "no-store"


def test_page_and_its_headers(client) -> None:
    for path in ("/", "/docs", "/page/app.js", "/page/style.css", "/page/look.js"):
        answer = client.get(path)
        assert answer.status_code == 200
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert not re.search(rb"(?:src|href|url)\s*[=(]\s*[\"']?(?:https?:)?//", answer.content)
    assert "access-control-allow-origin" not in client.get("/", headers={"Origin": "https://evil.example"}).headers


def png_header(width: int, height: int) -> bytes:
    """A PNG that declares a size and holds nothing."""
    import struct
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def eps() -> bytes:
    return b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"


@pytest.mark.parametrize(
    ("request_", "status", "words"),
    [
        ({"files": files(b"")}, 422, "photo0.png: the file is empty"),
        ({"files": files(b"hello")}, 422, "photo0.png: not an image"),
        ({"files": files(photo()[:200])}, 422, "photo0.png: truncated"),
        ({"files": files(png_header(20_000, 20_000))}, 422, "photo0.png: declares more than 178 megapixels"),
        ({"files": files(png_header(9_000, 9_000))}, 413, "photo0.png: 9000 x 9000 pixels are more than the 50"),
        ({"files": files(eps())}, 422, "not an image in a format that vitkit reads"),
        ({"files": files(*[photo()] * 33)}, 413, "at most 32 images"),
        ({"files": files(*[photo()] * 40)}, 413, "at most 32 images per request; got more than 32"),
        ({"files": [("image", ("a.png", photo()))]}, 400, "Expected the field `files`; got 'image'"),
        ({"data": {"files": "text"}}, 415, "Expected multipart/form-data, application/json or an image; got"),
        ({"content": b"hello", "headers": {"content-type": "image/jpeg"}}, 422, "image: not an image"),
        ({"content": b"", "headers": {"content-type": "image/jpeg"}}, 422, "image: the file is empty"),
        ({"content": photo(), "headers": {"content-type": "image"}}, 415, "or an image; got 'image'"),
        ({"content": b"--x\r\n", "headers": {"content-type": "multipart/form-data"}}, 400, "boundary"),
        ({"content": b"nonsense", "headers": {"content-type": "multipart/form-data; boundary=x"}}, 400, "multipart"),
        ({"content": b"[", "headers": {"content-type": "application/json"}}, 400, "Expected JSON"),
        ({"content": b"\xff\xfe", "headers": {"content-type": "application/json"}}, 400, "Expected JSON"),
        ({"json": []}, 400, "Expected JSON"),
        ({"json": {"images": []}}, 400, "images: List should have at least 1 item"),
        ({"json": {"images": [{"data": "?"}]}}, 400, "`data` is not valid base64"),
        ({"json": {"images": [{"path": "/etc/passwd"}]}}, 400, "images.0.data: Field required"),
        ({"json": {"images": [{"data": "aGVsbG8=", "name": "../../etc/passwd"}]}}, 422, "passwd: not an image"),
        ({}, 415, "Expected a Content-Type"),
    ],
)
def test_bad_requests_get_one_sentence(client, request_, status: int, words: str) -> None:
    answer = client.post("/v1/predict", **request_)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json")
    assert words in answer.json()["error"]
    assert set(answer.json()) == {"error", "kind"}
    assert "Traceback" not in answer.text
    assert not re.search(r" --[a-z]|vitkit doctor", answer.text)  # the command line is not the client's


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("predict?top=0", "top:"),
        ("predict?top=many", "top:"),
        ("explain?kind=dream", "kind:"),
        ("explain?kind=attention&layer=2", "layer must lie between 0 and 1"),
        ("explain?kind=attention&head=4", "head must lie between 0 and 3"),
        ("explain?kind=attention&query=17", "query must lie between 0 and 16"),
        ("explain?kind=rollout&layer=0", "kind='rollout' does not take layer"),
        ("explain?format=svg", "format:"),
        ("explain?kind=gradient&target=5", "class between 0 and 4"),
        ("picture?name=occlusion", "name:"),
        ("explain?kind=attention&layer=99999999999999999999", "layer:"),
    ],
)
def test_bad_choices_get_one_sentence(client, query: str, words: str) -> None:
    answer = client.post(f"/v1/{query}", files=files(photo()))
    assert answer.status_code == 422
    assert words in answer.json()["error"]


def test_the_same_reason_as_everywhere_and_advice_for_clients(client) -> None:
    with pytest.raises(BadImage, match="not an image") as raised:
        decode(b"hello", "photo0.png")
    assert str(raised.value) == f"{raised.value.sentence} Repair or remove it; `vitkit doctor` finds all such files."
    assert client.post("/v1/predict", files=files(b"hello")).json() == {
        "error": f"{raised.value.sentence} Send the file again, or convert it to JPEG or PNG.",
        "kind": "BadImage",
    }


@pytest.mark.parametrize("path", ["/v1/predict?top=1", "/v1/embed"])
def test_one_bad_image_among_several_has_its_own_error(client, path: str) -> None:
    long = png_header(9_000, 9_000)
    good, bad, large, also = client.post(path, files=files(photo(1), photo()[:200], long, photo(2))).json()["results"]
    alone = [client.post(path, files=files(photo(seed))).json()["results"][0] for seed in (1, 2)]

    def numbers(one: dict) -> list[float]:
        return (
            one["embedding"]
            if "embedding" in one
            else [value for top in one["top"] for value in (top["p"], top["index"])]
        )

    for several, single in zip((good, also), alone, strict=True):
        assert numbers(several) == pytest.approx(numbers(single), abs=1e-5)
    assert numbers(good) != pytest.approx(numbers(also), abs=1e-3)
    assert (bad["name"], bad["kind"]) == ("photo1.png", "BadImage")
    assert bad["error"].startswith("photo1.png: truncated")
    assert (large["name"], large["kind"]) == ("photo2.png", "TooLarge")
    assert "9000 x 9000 pixels are more than the 50" in large["error"]
    whole = client.post(path, files=files(b"a", b"b"))  # the same form, whatever is wrong
    assert whole.status_code == 200
    assert [one["kind"] for one in whole.json()["results"]] == ["BadImage", "BadImage"]


@pytest.mark.parametrize("kind", ["image/png", "image/jpeg; name=x", "application/octet-stream"])
def test_an_image_as_the_whole_body(client, kind: str) -> None:
    raw = photo(3)
    sent = client.post("/v1/predict", content=raw, headers={"content-type": kind})
    assert sent.status_code == 200
    assert sent.json()["results"][0]["top"] == client.post("/v1/predict", files=files(raw)).json()["results"][0]["top"]
    assert client.post("/v1/explain", content=raw, headers={"content-type": kind}).content.startswith(b"\x89PNG")


def test_an_example_of_the_documentation_works(client) -> None:
    body = client.get("/openapi.json").json()["paths"]["/v1/predict"]["post"]["requestBody"]["content"]
    answer = client.post("/v1/predict", json=body["application/json"]["example"])
    assert answer.status_code == 200, answer.text
    assert answer.json()["results"][0]["name"] == "pixel.png"
    assert {"multipart/form-data", "image/jpeg"} < set(body)


@pytest.mark.parametrize("path", ["/v1/predict", "/v1/embed"])
def test_the_examples_of_answers_have_the_form_of_answers(client, path: str) -> None:
    content = client.get("/openapi.json").json()["paths"][path]["post"]["responses"]["200"]["content"]
    example = content["application/json"]["example"]
    answer = client.post(path, files=files(photo(), b"broken")).json()
    assert example.keys() == answer.keys()
    assert [one.keys() for one in example["results"]] == [one.keys() for one in answer["results"]]


def test_pictures_suit_light_and_dark_pages(client) -> None:
    def mean(query: str) -> np.ndarray:
        raw = client.post(f"/v1/picture?name=predictions{query}", files=files(photo())).content
        pixels = np.asarray(Image.open(io.BytesIO(raw)).convert("RGBA")).reshape(-1, 4)
        text = pixels[(pixels[:, 3] > 250) & (np.ptp(pixels[:, :3].astype(int), axis=1) < 40)]
        return np.array([pixels[0, 3], text[:, :3].mean()])

    assert mean("")[0] == 255  # opaque, unless a page asks
    assert mean("&theme=light") == pytest.approx([0, 75], abs=30)
    assert mean("&theme=dark") == pytest.approx([0, 215], abs=30)


def test_nothing_there_and_wrong_methods(client) -> None:
    assert client.get("/page/../../../etc/passwd").status_code == 404
    assert client.get("/samples/..%2f..%2fsecret").json()["error"].startswith("Nothing was found")
    assert client.get("/v1/predict").status_code == 405
    assert client.get("/v1/predict").headers["allow"] == "POST"
    assert client.post("/v1/explain", files=files(photo(), photo())).status_code == 400


def test_size_limits(client_with) -> None:
    client = client_with(max_megabytes=0.01, max_files=2, max_queue=2)
    big = client.post("/v1/predict", files=files(b"x" * 20_000))
    assert (big.status_code, big.json()["kind"]) == (413, "TooLarge")

    def unannounced():
        for _ in range(100):
            yield b"x" * 1000

    streamed = client.post("/v1/predict", content=unannounced(), headers={"content-type": "application/json"})
    assert streamed.status_code == 413
    assert client.post("/v1/predict", files=files(photo(size=(8, 8)))).status_code == 200


def test_a_request_of_exactly_the_limit_is_accepted(client_with) -> None:
    raw = base64.b64encode(photo(size=(8, 8))).decode()
    limit = 4096
    client = client_with(max_megabytes=limit / 2**20)
    headers = {"content-type": "application/json"}
    for size, status in ((limit, 200), (limit + 1, 413)):
        body = f'{{"images": [{{"data": "{raw}"}}]}}'.ljust(size).encode()
        streamed = (body[i : i + 1000] for i in range(0, size, 1000))  # without a Content-Length
        assert client.post("/v1/predict", content=body, headers=headers).status_code == status
        assert client.post("/v1/predict", content=streamed, headers=headers).status_code == status
    assert (client.app.in_progress, client.app.held) == (0, 0)  # refused requests hold nothing either


def test_as_many_images_as_the_limit_are_accepted(client_with) -> None:
    client = client_with(max_files=2, max_queue=2)
    data = {"data": base64.b64encode(photo()).decode()}
    for count, status in ((2, 200), (3, 413)):
        assert client.post("/v1/predict", files=files(*[photo()] * count)).status_code == status
        assert client.post("/v1/predict", json={"images": [data] * count}).status_code == status


def test_an_image_of_exactly_the_limit_is_accepted() -> None:
    from vitkit.errors import TooLarge
    from vitkit.server.uploads import Upload, measure

    spec, settings = tiny().input_spec, Settings(max_megapixels=0.0016)
    assert measure(Upload("a.png", photo(size=(40, 40))), spec, settings) == 1600
    with pytest.raises(TooLarge, match=r"41 x 40 pixels are more than the 0\.0016 megapixels"):
        measure(Upload("a.png", photo(size=(41, 40))), spec, settings)


def test_a_long_thin_image_is_refused_before_it_grows() -> None:
    import dataclasses

    from vitkit.errors import TooLarge
    from vitkit.server.uploads import Upload, measure

    spec = dataclasses.replace(tiny().input_spec, resize="crop", crop=0.9)
    raw = photo(size=(60_000, 1))
    with pytest.raises(TooLarge, match="60000 x 1 pixels are too long and thin"):
        measure(Upload("thin.png", raw), spec, Settings(max_megapixels=1))


def test_token(client_with) -> None:
    client = client_with(token="correct-horse")
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "correct-horse"},
        {"Authorization": "Basic correct-horse"},
        {"Authorization": "Bearer \u00e9".encode()},
    ):
        refused = client.get("/v1/model", headers=headers)
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert client.post("/v1/predict", files=files(photo()), headers=headers).status_code == 401
        assert client.get("/metrics", headers=headers).status_code == 401
        assert client.get("/openapi.json", headers=headers).status_code == 401
    right = {"Authorization": "Bearer correct-horse"}
    assert client.get("/v1/model", headers=right).status_code == 200
    assert client.post("/v1/predict", files=files(photo()), headers=right).status_code == 200
    for path in ("/", "/healthz", "/readyz"):
        assert client.get(path).status_code == 200


def test_tokens_are_compared_in_constant_time(client_with, monkeypatch: pytest.MonkeyPatch) -> None:
    import secrets

    compared = []
    monkeypatch.setattr(secrets, "compare_digest", lambda a, b: compared.append((a, b)) or a == b)
    client = client_with(token="correct-horse")
    for given, status in (("correct-horsf", 401), ("correct-horse", 200), ("wrong", 401)):
        assert client.get("/v1/model", headers={"Authorization": f"Bearer {given}"}).status_code == status
    assert compared == [(given, b"correct-horse") for given in (b"correct-horsf", b"correct-horse", b"wrong")]


HOSTS = ("localhost", "[::1]", "MyServer.local", "example.com:8000", "*.lab.example", "fe80::1")


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:8000",
        "LOCALHOST",
        "[::1]",
        "[::1]:8000",
        "myserver.local",
        "MyServer.local:80",
        "example.com",
        "example.com:8000",
        "example.com:9999",
        "gpu3.lab.example",
        "[fe80::1]:8000",
    ],
)
def test_allowed_hosts_are_answered(client_with, host: str) -> None:
    assert client_with(hosts=HOSTS).get("/v1/model", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "rebound.example:80",
        "[::1]evil.com",
        "[::1].evil.com",
        "[::1",
        "::1",
        "[::2]:8000",
        "localhost.evil.com",
        "localhost:8000.evil.com",
        "localhost:8000@evil.com",
        "evil.com/localhost",
        "evil-localhost",
        "evillab.example",
        "lab.example",
        "www.localhost",
        "127.0.0.1",
        "",
    ],
)
def test_other_hosts_are_refused(client_with, host: str) -> None:
    client = client_with(hosts=HOSTS)
    for path in ("/", "/v1/model", "/metrics"):
        refused = client.get(path, headers={"Host": host})
        assert refused.status_code == 400
        assert refused.json() == {
            "error": "This server answers to localhost, [::1], myserver.local, example.com, *.lab.example, [fe80::1]; "
            "the request was for another host name. Use one of these names.",
            "kind": "RequestError",
        }
        assert "default-src 'none'" in refused.headers["content-security-policy"]
    assert client.post("/v1/predict", files=files(photo()), headers={"Host": host}).status_code == 400
    assert client.get("/healthz", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["https://example.com", "example.com/x", "a b", "", "*example.com", "a.*.com", "[::1"])
def test_host_names_that_cannot_match_are_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=r"hosts must be names such as example\.com"):
        Settings(hosts=(host,))


def test_frames(client_with) -> None:
    assert "frame-ancestors 'none'" in client_with().get("/").headers["content-security-policy"]
    page = client_with(embed_in="https://huggingface.co").get("/")
    assert "frame-ancestors https://huggingface.co" in page.headers["content-security-policy"]


def test_busy_and_starting(client_with, service) -> None:
    client = client_with(max_requests=1, max_files=2, max_queue=2)
    client.app.in_progress = 1
    refused = client.post("/v1/predict", files=files(photo()))
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    client.app.in_progress = 0
    assert client.post("/v1/predict", files=files(photo())).status_code == 200
    with client.app.service.logits.reserve(2):
        refused = client.post("/v1/predict", files=files(photo()))
        assert (refused.status_code, refused.json()["kind"]) == (503, "Busy")
        assert int(refused.headers["retry-after"]) >= 1
    client.app.service.ready = False
    assert client.post("/v1/predict", files=files(photo())).status_code == 503
    assert client.get("/readyz").status_code == 503


def test_all_bodies_together_are_bounded(client_with) -> None:
    client = client_with(max_megabytes=0.125)
    client.app.held = 2**20  # eight times as much, as Settings says
    refused = client.post("/v1/predict", files=files(photo()))
    assert (refused.status_code, refused.json()["kind"]) == (503, "Busy")
    assert "retry-after" in refused.headers
    client.app.held = 2**20 - 2**16
    assert client.post("/v1/predict", files=files(photo())).status_code == 200
    assert client.app.held == 2**20 - 2**16


def test_an_internal_error_shows_nothing_of_the_inside(client_with) -> None:
    from starlette.testclient import TestClient

    client = client_with()
    app = client.app
    app.service.logits.run = lambda items: 1 / 0
    answer = TestClient(app, raise_server_exceptions=False).post("/v1/predict", files=files(photo()))
    assert answer.status_code == 500
    assert answer.json() == {"error": "Internal server error; see the server log.", "kind": "ServerError"}


def test_no_answer_in_time_is_busy(client_with) -> None:
    import time

    client = client_with(answer_seconds=0.2)
    run = client.app.service.logits.run
    client.app.service.logits.run = lambda items: (time.sleep(0.6), run(items))[1]
    answer = client.post("/v1/predict", files=files(photo()))
    assert (answer.status_code, answer.json()["kind"]) == (503, "Busy")


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_batch": 0},
        {"max_delay": -1},
        {"max_queue": 3, "max_files": 4},
        {"token": "short"},
        {"embed_in": "here"},
        {"token": "with a space in it"},
        {"max_megapixels": 0},
    ],
)
def test_settings_refuse_nonsense(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Settings(**wrong)  # type: ignore[arg-type]
