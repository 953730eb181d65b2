"""Opens every page of the built site in Chromium, without a screen, and looks: `site_in_browser.py SITE`.

Formulas are rendered, pictures and long lines of code are whole, search finds, the choice of an environment
changes the curves, and no page asks for anything outside the site: a server here answers, and forbids the
rest by a Content-Security-Policy that reports.
"""

import contextlib
import http.server
import json
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --disable-dev-shm-usage --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync --window-size=1280,900"
).split()
POLICY = "default-src 'self' data: 'unsafe-inline' 'unsafe-eval'; report-uri /outside"
PATIENCE = 240  # seconds until the browser must have answered
LOOK = """<!DOCTYPE html><link rel="icon" href="data:,"><body style="margin: 0"><script>
async function look(page) {
  const frame = document.createElement("iframe"), sleep = ms => new Promise(done => setTimeout(done, ms));
  frame.style = "width: 1280px; height: 900px; border: 0";
  const loaded = new Promise(done => frame.onload = done);
  frame.src = page;
  document.body.append(frame);
  await loaded;
  const inside = frame.contentDocument, all = css => [...inside.querySelectorAll(css)];
  const formulas = all(".math"), searched = page.includes("search.html?");
  if (formulas.length) await frame.contentWindow.MathJax?.startup?.promise;
  for (let i = 0; searched && i < 100 && !all("#search-results li").length; i++) await sleep(100);
  const choice = inside.getElementById("environment"), curves = () => all("#curves .trace").length;
  const before = choice && curves();
  if (choice) {
    choice.value = "FrozenLake-v1";
    choice.dispatchEvent(new Event("change"));
    await sleep(200);
  }
  const seen = x => x && x.getBoundingClientRect().width > 4 && x.getBoundingClientRect().height > 4;
  const result = {
    page, formulas: formulas.length, found: all("#search-results li").length,
    curves_missing: choice && !(before > 10 && curves() > 5 && curves() !== before),
    unrendered: formulas.filter(x => !seen(x.querySelector("mjx-container svg"))).map(x => x.textContent),
    wrong: all("[data-mjx-error], mjx-container [fill=red]").map(x => x.closest(".math").textContent),
    pictures_empty_or_not_linked: all("article img").filter(x => !x.naturalWidth || !x.closest("a")).length,
    cut_formulas: all("div.math").filter(x => x.scrollWidth > x.clientWidth).map(x => x.textContent),
    cut_code: all(".highlight-diff pre, pre:has(.linenos)").filter(x => x.scrollWidth > x.clientWidth).length,
  };
  frame.remove();
  return result;
}
(async () => {
  const results = [];
  for (const page of PAGES) results.push(await look(page).catch(error => ({page, error: String(error)})));
  await fetch("/results", {method: "POST", body: JSON.stringify(results)});
})();
</script>"""


class Server(http.server.SimpleHTTPRequestHandler):
    pages, outside, answer = [], [], queue.Queue()

    def do_GET(self):
        if self.path != "/look":
            with contextlib.suppress(ConnectionError):  # a page may be left before all of it is read
                super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(LOOK.replace("PAGES", json.dumps(self.pages)).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/results":
            self.answer.put(body)
        else:
            report = body["csp-report"]
            self.outside.append(f"{report['document-uri']} asks for {report['blocked-uri']}")
        self.send_response(204)
        self.end_headers()

    def end_headers(self):
        self.send_header("Content-Security-Policy", POLICY)
        super().end_headers()

    def send_error(self, code, *message):
        self.outside.append(f"{self.path}: {code}")
        super().send_error(code, *message)

    def log_message(self, *_):
        pass


def problems(result: dict, algorithms: set[str]) -> list[str]:
    page = result.pop("page")
    if "error" in result:
        return [f"{page}: {result['error']}"]
    formulas, found = result.pop("formulas"), result.pop("found")
    told = [f"{page}: {name}: {value}" for name, value in result.items() if value]
    if page in algorithms and not formulas:
        told.append(f"{page}: no formula")
    if "search.html?" in page and not found:
        told.append(f"{page}: nothing found")
    return told


def main(site: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not browser:
        print("skipped: no Chromium")
        return
    algorithms = {f"{path.stem}.html" for path in (Path(__file__).parents[1] / "algos").glob("*.py")}
    Server.pages = [str(path.relative_to(site)) for path in sorted(site.rglob("*.html"))]
    Server.pages += ["search.html?q=compute_gae"]
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Server, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [browser, *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-port=0"]
        url = f"http://127.0.0.1:{server.server_port}/look"
        process = subprocess.Popen([*command, url], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            results = Server.answer.get(timeout=PATIENCE)
        except queue.Empty:
            sys.exit(f"{browser} did not answer within {PATIENCE} seconds")
        finally:
            process.kill()
            process.wait()
    formulas = sum(result.get("formulas", 0) for result in results)
    told = [line for result in results for line in problems(result, algorithms)]
    told += sorted(set(Server.outside))
    if told:
        sys.exit("\n".join(told))
    print(f"{len(results)} pages looked at, {formulas} formulas rendered")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
