"""Opens every page of the built site in Chromium, without a screen, and looks: `site_in_browser.py SITE`.

Formulas are rendered, pictures and long lines of code are whole, search finds, the choice of an environment
changes the curves, the cart and pole move as Gymnasium's do and the policy balances them, and no page asks
for anything outside the site: a server here answers, and forbids the rest by a Content-Security-Policy that
reports. At all WIDTHS no page scrolls sideways, and what is too wide has a scrollbar of its own.
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

import gymnasium as gym
import numpy as np

WIDTHS = [320, 360, 768, 1024, 1366, 1920]  # of phones, tablets and screens, besides 1280
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --disable-dev-shm-usage --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync --window-size=1280,900"
).split()
POLICY = "default-src 'self' data: 'unsafe-inline' 'unsafe-eval'; report-uri /outside"
PATIENCE = 600  # seconds until the browser must have answered
LOOK = """<!DOCTYPE html><link rel="icon" href="data:,"><body style="margin: 0"><script>
const sleep = ms => new Promise(done => setTimeout(done, ms));

// What is cut at this width. A box that scrolls inside the column of the page may hide what it can scroll to.
function cut(inside) {
  const style = x => inside.defaultView.getComputedStyle(x), known = new Map(), found = [];
  const page = inside.documentElement, column = inside.querySelector(".content");
  for (const box of [page, inside.body, inside.querySelector(".main"), column]) {
    const beyond = box ? box.scrollWidth - box.clientWidth : 0;
    if (beyond > 1) found.push(`the page scrolls sideways by ${beyond}`);
  }
  const parts = "table, img, pre, canvas, video, h1, h2, h3, p, li, button, select, .math svg, #curves";
  for (const x of inside.querySelectorAll(`article :is(${parts}), .toc-tree a`)) {
    const drawer = x.closest(".toc-drawer");
    if (drawer && style(drawer).position === "fixed") continue; // it slides in
    let { left, right } = x.getBoundingClientRect();
    const overflows = x.tagName === "PRE" && x.scrollWidth > x.clientWidth + 1;
    let hidden = overflows && !/auto|scroll/.test(style(x).overflowX);
    for (let box = x.parentElement; box && box !== column && box !== inside.body; box = box.parentElement) {
      if (!known.has(box)) known.set(box, [style(box).overflowX, box.getBoundingClientRect()]);
      const [overflow, edge] = known.get(box);
      if (/auto|scroll/.test(overflow)) ({ left, right } = edge);
      else hidden ||= /hidden|clip/.test(overflow) && (left < edge.left - 1 || right > edge.right + 1);
    }
    if (hidden || left < -1 || right > page.clientWidth + 1) {
      found.push(`${x.tagName} ${x.textContent.trim().slice(0, 30)}`);
    }
  }
  return found.slice(0, 5);
}

// Of the page of all curves: how many lines there are at first, with each seed, and of another environment.
async function curves(inside) {
  const [choice, seeds] = ["environment", "seeds"].map(id => inside.getElementById(id));
  const drawn = async (box, name, value) => {
    box[name] = value;
    box.dispatchEvent(new Event("change"));
    await sleep(200);
    return inside.querySelectorAll("#curves .trace").length;
  };
  const means = inside.querySelectorAll("#curves .trace").length;
  const all = await drawn(seeds, "checked", true), others = await drawn(choice, "value", "FrozenLake-v1");
  await drawn(seeds, "checked", false), await drawn(choice, "value", "CartPole-v1");
  const right = means > 5 && means < 20 && all > 5 * means && others > 5 && others !== all;
  return right ? "" : `${means}, ${all}, ${others} lines`;
}

// MOVES = [[state, force, next state, whether that ends the episode, probabilities]] of Gymnasium and NumPy
async function cartPole(inside) {
  const live = inside.defaultView.cartPole, wrong = [], id = name => inside.getElementById(`live-${name}`);
  const near = (a, b) => a.length === b.length && a.every((x, i) => Math.abs(x - b[i]) < 1e-9);
  for (const [state, force, next, failed, odds] of MOVES) {
    const moved = live.physics(state, force), own = live.probabilities(state);
    if (!near(moved, next)) wrong.push(`${state} moves to ${moved}, not ${next}`);
    if (live.failed(next) !== failed) wrong.push(`${next} should ${failed ? "" : "not "}end the episode`);
    if (!near(own, odds)) wrong.push(`${state} has probabilities ${own}, not ${odds}`);
  }
  live.reset();
  for (let i = 0; i < 100 && live.steps < 5; i++) await sleep(100);
  if (live.steps < 5) wrong.push("it does not move by itself");
  live.reset();
  for (let i = 0; i < 500; i++) live.advance();
  if (live.failed(live.state)) wrong.push("the policy does not balance the pole");
  id("policy").checked = false;
  const push = (target, kind, begin, end, init) => { // what it adds to the velocity
    live.reset();
    const [, before] = live.state;
    target.dispatchEvent(new kind(begin, init));
    for (let i = 0; i < 6; i++) live.advance();
    target.dispatchEvent(new kind(end, init));
    return live.state[1] - before;
  };
  for (const [side, sign] of [["Left", -1], ["Right", 1]]) {
    const button = id(`push-${side.toLowerCase()}`), key = { key: `Arrow${side}`, bubbles: true };
    if (push(button, PointerEvent, "pointerdown", "pointerup") * sign < 0.5) wrong.push(`no button ${side}`);
    if (push(inside.body, KeyboardEvent, "keydown", "keyup", key) * sign < 0.5) wrong.push(`no key ${side}`);
  }
  for (let i = 0; i < 500 && !live.failed(live.state); i++) live.advance();
  if (!live.failed(live.state)) wrong.push("without the policy the pole stands");
  id("policy").checked = true;
  id("reset").click();
  if (live.failed(live.state)) wrong.push("no reset");
  return wrong.slice(0, 5);
}

async function look(page) {
  const frame = document.createElement("iframe");
  frame.style = "width: 1280px; height: 900px; border: 0";
  const loaded = new Promise(done => frame.onload = done);
  frame.src = page;
  document.body.append(frame);
  await loaded;
  const inside = frame.contentDocument, all = css => [...inside.querySelectorAll(css)];
  const formulas = all(".math"), searched = page.includes("search.html?");
  if (formulas.length) await frame.contentWindow.MathJax?.startup?.promise;
  for (let i = 0; searched && i < 100 && !all("#search-results li").length; i++) await sleep(100);
  const seen = x => x && x.getBoundingClientRect().width > 4 && x.getBoundingClientRect().height > 4;
  const result = {
    page, formulas: formulas.length, found: all("#search-results li").length,
    curves_missing: inside.getElementById("environment") && await curves(inside),
    cart_pole_wrong: inside.getElementById("live") ? await cartPole(inside) : [],
    unrendered: formulas.filter(x => !seen(x.querySelector("mjx-container svg"))).map(x => x.textContent),
    wrong: all("[data-mjx-error], mjx-container [fill=red]").map(x => x.closest(".math").textContent),
    pictures_empty_or_not_linked: all("article img").filter(x => !x.naturalWidth || !x.closest("a")).length,
    cut_formulas: all("div.math").filter(x => x.scrollWidth > x.clientWidth).map(x => x.textContent),
    cut_code: all(".highlight-diff pre, pre:has(.linenos)").filter(x => x.scrollWidth > x.clientWidth).length,
  };
  for (const width of page.startsWith("source/") ? [360, 1366] : WIDTHS) { // sources are alike, and long
    frame.style.width = `${width}px`;
    const told = () => result[`cut_at_${width}`] = cut(inside);
    for (let i = 0; told().length && page === "curves.html" && i < 20; i++) await sleep(200); // late
  }
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
    pages, moves, outside, answer = [], [], [], queue.Queue()

    def do_GET(self):
        if self.path != "/look":
            with contextlib.suppress(ConnectionError):  # a page may be left before all of it is read
                super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        text = LOOK.replace("PAGES", json.dumps(self.pages)).replace("WIDTHS", json.dumps(WIDTHS))
        self.wfile.write(text.replace("MOVES", json.dumps(self.moves)).encode())

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


def cart_pole_moves() -> list:
    """[state, force, next state, whether that ends the episode, probabilities] of Gymnasium and NumPy."""
    policy = json.loads((Path(__file__).parents[1] / "docs/live_policy.json").read_text())
    env, rng, moves = gym.make("CartPole-v1").unwrapped, np.random.default_rng(1), []
    env.reset(seed=1)
    for _ in range(200):
        env.state = rng.uniform(-1, 1, 4) * [2.5, 3, 0.22, 3]
        env.steps_beyond_terminated = None
        state, action = env.state.tolist(), int(rng.integers(2))
        terminated = env.step(action)[2]
        moves.append([state, [-10, 10][action], env.state.tolist(), terminated, probabilities(policy, state)])
    return moves


def probabilities(policy: dict, observation: list[float]) -> list[float]:
    """What the network of live_policy.json gives for an observation: of a push to the left, to the right."""
    x, layers = np.array(observation), policy["layers"]
    for i, layer in enumerate(layers):
        x = np.array(layer["weights"]) @ x + layer["biases"]
        x = np.tanh(x) if i < len(layers) - 1 else np.exp(x - x.max())
    return (x / x.sum()).tolist()


def main(site: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not browser:
        print("skipped: no Chromium")
        return
    algorithms = {f"{path.stem}.html" for path in (Path(__file__).parents[1] / "algos").glob("*.py")}
    Server.pages = [str(path.relative_to(site)) for path in sorted(site.rglob("*.html"))]
    Server.pages += ["search.html?q=compute_gae"]
    Server.moves = cart_pole_moves()
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
