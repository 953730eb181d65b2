// CartPole-v1 on a canvas, balanced by the policy of live_policy.json: POLICY = {layers: [{weights, biases}]}.
// The equations are those of the cart and pole of Barto, Sutton and Anderson 1983 in the form of Florian 2007,
// without friction, with the constants, the Euler steps and the limits of Gymnasium's CartPole-v1.
(() => {
  const GRAVITY = 9.8, CART = 1, POLE = 0.1, HALF_LENGTH = 0.5; // m/s², kg, kg, m
  const FORCE = 10, STEP = 0.02, TRACK = 2.4, TILT = 12 * Math.PI / 180; // N, s, m, radians
  const TAP = 5; // steps that the shortest push lasts
  const find = id => document.getElementById(id), canvas = find("live-canvas"), pen = canvas.getContext("2d");
  let state, steps, force, odds; // state: position, velocity, angle, angular velocity; force and odds of the last step
  let playing = !matchMedia("(prefers-reduced-motion: reduce)").matches;
  let held = 0, last = 0, left = 0; // the push of the reader: direction while held, the last one and its steps left

  function physics([x, v, angle, spin], force) {
    const sin = Math.sin(angle), cos = Math.cos(angle), mass = CART + POLE, moment = POLE * HALF_LENGTH;
    const drive = (force + moment * spin ** 2 * sin) / mass;
    const turn = (GRAVITY * sin - cos * drive) / (HALF_LENGTH * (4 / 3 - POLE * cos ** 2 / mass));
    return [x + STEP * v, v + STEP * (drive - moment * turn * cos / mass), angle + STEP * spin, spin + STEP * turn];
  }

  const failed = ([x, , angle]) => Math.abs(x) > TRACK || Math.abs(angle) > TILT;

  // Of a push to the left and to the right.
  function probabilities(observation) {
    const logits = POLICY.layers.reduce((input, { weights, biases }, i) => weights.map((row, j) => {
      const sum = row.reduce((sum, weight, k) => sum + weight * input[k], biases[j]);
      return i < POLICY.layers.length - 1 ? Math.tanh(sum) : sum;
    }), observation);
    const powers = logits.map(x => Math.exp(x - Math.max(...logits)));
    return powers.map(x => x / (powers[0] + powers[1]));
  }

  function reset() {
    state = [0, 0, 0, 0].map(() => 0.1 * Math.random() - 0.05);
    steps = force = held = left = 0;
    odds = probabilities(state);
    tell();
  }

  // One step of the simulation: the push of the policy, if it is on, plus the push of the reader.
  function advance() {
    odds = probabilities(state);
    force = find("live-policy").checked ? (odds[1] > odds[0] ? FORCE : -FORCE) : 0;
    force += FORCE * (held || (left > 0 ? last : 0));
    left--;
    state = physics(state, force);
    steps++;
    if (failed(state) || steps % 10 === 0) tell();
  }

  function push(direction) {
    held = last = direction;
    left = TAP;
    if (!playing) toggle();
  }

  function toggle() {
    playing = !playing;
    tell();
  }

  function tell() {
    const [x, , angle] = state, on = find("live-policy").checked;
    const end = Math.abs(angle) > TILT ? "the pole fell" : Math.abs(x) > TRACK ? "the cart left the track" : "";
    find("live-says").textContent = `step ${steps.toLocaleString("en")}${end && `: ${end}. Reset starts again.`}`;
    find("live-left").textContent = on ? `left ${odds[0].toFixed(2)}` : "policy off";
    find("live-right").textContent = on ? `right ${odds[1].toFixed(2)}` : "";
    find("live-bar").style.setProperty("--share", on ? odds[0] : 0);
    find("live-pause").textContent = playing ? "Pause" : "Play";
  }

  function draw() {
    const ratio = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      [canvas.width, canvas.height] = [Math.round(width * ratio), Math.round(height * ratio)];
    }
    const style = getComputedStyle(document.body), color = name => style.getPropertyValue(`--color-${name}`);
    const ink = color("foreground-primary"), faint = color("foreground-border"), accent = color("brand-primary");
    const meter = width / (2 * TRACK + 0.7), ground = height - 0.3 * meter;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    const line = (points, color, thick, dash = []) => {
      pen.beginPath(), pen.setLineDash(dash);
      points.forEach(([x, y]) => pen.lineTo(width / 2 + x * meter, ground - y * meter));
      [pen.strokeStyle, pen.lineWidth, pen.lineCap] = [color, thick, dash.length ? "butt" : "round"];
      pen.stroke();
    };
    const [x, , angle] = state, axle = 0.34, top = tilt => [x + Math.sin(tilt), axle + Math.cos(tilt)];
    line([[-TRACK, 0], [TRACK, 0]], faint, 2);
    for (const end of [-TRACK, TRACK]) line([[end, -0.1], [end, 0.1]], faint, 3);
    for (const tilt of [-TILT, TILT]) line([[x, axle], top(tilt)], faint, 1, [4, 5]);
    const own = force && Math.sign(force);
    if (own) { // an arrow behind the cart, as long as the force is large
      const tail = x - own * (0.3 + 0.018 * Math.abs(force)), tip = x - own * 0.3;
      line([[tail, 0.23], [tip, 0.23]], accent, 2);
      line([[tip - own * 0.06, 0.28], [tip, 0.23], [tip - own * 0.06, 0.18]], accent, 2);
    }
    pen.fillStyle = ink;
    pen.beginPath();
    pen.roundRect(width / 2 + (x - 0.25) * meter, ground - axle * meter, 0.5 * meter, 0.22 * meter, 0.04 * meter);
    for (const wheel of [-0.14, 0.14]) {
      pen.moveTo(width / 2 + (x + wheel) * meter, ground);
      pen.arc(width / 2 + (x + wheel) * meter, ground - 0.07 * meter, 0.07 * meter, 0, 7);
    }
    pen.fill();
    line([[x, axle], top(angle)], failed(state) ? "#d33" : accent, Math.max(4, 0.07 * meter));
  }

  let before = 0, behind = 0; // milliseconds that the simulation has to catch up with
  function frame(now) {
    behind = Math.min(behind + now - before, 200);
    before = now;
    for (; behind >= 1000 * STEP; behind -= 1000 * STEP) if (playing && !failed(state)) advance();
    draw();
    requestAnimationFrame(frame);
  }

  for (const [id, direction] of [["live-push-left", -1], ["live-push-right", 1]]) {
    const button = find(id);
    button.addEventListener("pointerdown", () => push(direction));
    for (const end of ["pointerup", "pointerleave", "pointercancel"]) button.addEventListener(end, () => held = 0);
    button.addEventListener("click", event => { // the space bar and screen readers: a tap
      if (!event.detail) push(direction), held = 0;
    });
    button.addEventListener("contextmenu", event => event.preventDefault()); // a long touch
  }
  const keys = { ArrowLeft: -1, ArrowRight: 1 };
  addEventListener("keydown", event => {
    const typing = event.target.closest?.("input:not([type=checkbox]), textarea, select");
    if (!keys[event.key] || typing || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    if (!event.repeat) push(keys[event.key]);
  });
  addEventListener("keyup", event => keys[event.key] === held && (held = 0));
  addEventListener("blur", () => held = 0);
  find("live-reset").addEventListener("click", reset);
  find("live-pause").addEventListener("click", toggle);
  find("live-policy").addEventListener("change", tell);
  reset();
  requestAnimationFrame(now => frame(before = now));
  const now = { get state() { return state; }, get steps() { return steps; } };
  window.cartPole = Object.assign(now, { physics, failed, probabilities, reset, advance }); // for tests
})();
