"""Uploading to the Hugging Face Hub and loading from it, against a small server that speaks the hub's protocol."""

import base64
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

COMMIT = "1" * 40
SCRIPT = """
import sys, timm, torch
from solver_plugins import calibrate, convert_model, load, save
model = convert_model(timm.create_model("solver_lenet"), "proxgd", iters=2, targets=["fc1", "fc2"]).eval()
x = torch.randn(4, 3, 32, 32)
calibrate(model, [x], progress=False)
save(model, "saved", push_to_hub="me/lenet", metrics={"accuracy": 0.5})
again = timm.create_model("hf-hub:me/lenet", pretrained=True).eval()
assert torch.equal(again(x), model(x))
try:
    save(model, "again", push_to_hub="me/else")
except Exception as error:
    print(type(error).__name__, error)
"""


class Hub(BaseHTTPRequestHandler):
    """Makes repositories of ``me``, takes commits, gives files back."""

    def log_message(self, *arguments):
        pass

    def answer(self, body, status=200, **headers):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), "Content-Type": "application/json", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def do_POST(self):
        sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append((self.path, self.headers.get("Authorization")))
        if "/me/else" in self.path:
            self.answer({"error": "you may not write there"}, 403)
        elif self.path == "/api/repos/create":
            self.answer({"url": f"{self.server.address}/me/{json.loads(sent)['name'].rpartition('/')[2]}"})
        elif self.path.endswith("/preupload/main"):
            names = [one["path"] for one in json.loads(sent)["files"]]
            self.answer({"files": [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]})
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif self.path.endswith("/commit/main"):
            for line in sent.splitlines():
                part = json.loads(line)
                if part["key"] == "file":
                    self.server.files[part["value"]["path"]] = base64.b64decode(part["value"]["content"])
            url = f"{self.server.address}/me/lenet/commit/{COMMIT}"
            self.answer({"success": True, "commitOid": COMMIT, "commitUrl": url})
        else:
            self.answer({"error": "unknown"}, 404)

    def do_GET(self):
        name = self.path.partition("?")[0].rpartition("/")[2]
        if "/resolve/" in self.path and name in self.server.files:
            data = self.server.files[name]
            self.answer(data, ETag=f'"{name}"', X_Repo_Commit=COMMIT)
        elif "/resolve/" in self.path:
            self.answer({"error": "no such file"}, 404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
        else:
            files = [{"rfilename": file} for file in self.server.files]
            self.answer({"id": "me/lenet", "sha": COMMIT, "siblings": files, "private": False, "tags": []})

    do_HEAD = do_GET  # noqa: N815


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.files, server.asked, server.address = {}, [], f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_to_the_hub_and_back(hub, tmp_path):
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    own = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_abc", "HF_HUB_OFFLINE": "0"}
    own |= {"PYTHONPATH": os.getcwd(), "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    done = subprocess.run(command, cwd=tmp_path, env={**clean, **own}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert set(hub.files) == {path.name for path in (tmp_path / "saved").iterdir()}
    card = hub.files["README.md"].decode()
    assert (
        card.startswith("---\nlibrary_name: timm\n")
        and "| fc1 | proxgd | 2 | " in card
        and "| accuracy | 0.5 |" in card
    )
    assert all(token == "Bearer hf_abc" for path, token in hub.asked if path != "/api/validate-yaml")
    # What could not be uploaded is saved all the same.
    assert "SavingError 'again' is saved, but could not be uploaded to 'me/else'" in done.stdout
    assert (tmp_path / "again" / "config.json").is_file()
