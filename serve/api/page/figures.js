// What one answer's chunks say of speculation, and how it is worded and drawn. A chunk is one pass of the target;
// the first comes of reading the prompt, so it counts for no rate.

const MOST_BARS = 48;
const SVG = "http://www.w3.org/2000/svg";

/** Counts of one answer; times in milliseconds. */
export class Figures {
  constructor(asked) {
    this.asked = asked;
    this.first = null;
    this.last = null;
    this.numTokens = 0;
    this.numFirst = 0;
    this.numAccepted = 0;
    this.numRejected = 0;
    this.passes = []; // accepted drafts of each, after the first
  }

  add(speculation, now) {
    this.last = now;
    this.numTokens += speculation.num_tokens;
    this.numAccepted += speculation.num_accepted;
    this.numRejected += speculation.num_rejected;
    if (this.first === null) {
      this.first = now;
      this.numFirst = speculation.num_tokens;
    } else {
      this.passes.push(speculation.num_accepted);
    }
  }

  /** The figures in words, by the ids that they have on the page. */
  get words() {
    const later = this.numTokens - this.numFirst;
    const seconds = (this.last - this.first) / 1000;
    const drafted = this.numAccepted + this.numRejected;
    return {
      tau: ratio(later, this.passes.length, (value) => value.toFixed(2)),
      speed: ratio(later, seconds, (value) => value.toFixed(value < 100 ? 1 : 0)),
      first: this.first === null ? "–" : duration(this.first - this.asked),
      share: ratio(this.numAccepted, this.numTokens, percent),
      accepted: ratio(this.numAccepted, drafted, percent),
      counts: this.numTokens ? `${this.numTokens} / ${this.passes.length}` : "–",
    };
  }

  /** One line to stand under an answer. */
  get summary() {
    const { tau, speed, first, share } = this.words;
    const tokens = `${this.numTokens} ${this.numTokens === 1 ? "token" : "tokens"}`;
    return `τ ${tau} · ${speed} tokens/s · ${share} from drafts · first token ${first} · ${tokens}`;
  }
}

/** A bar for each of the last passes. */
export function drawPasses(svg, passes) {
  const { width, height } = svg.viewBox.baseVal;
  const shown = passes.slice(-MOST_BARS);
  const step = width / MOST_BARS;
  const most = Math.max(4, ...shown);
  const bars = shown.map((count, index) => {
    const bar = document.createElementNS(SVG, "rect");
    const tall = Math.max(3, (count / most) * height);
    const sizes = { x: index * step, y: height - tall, width: step - 1.5, height: tall };
    for (const [name, value] of Object.entries(sizes)) bar.setAttribute(name, value.toFixed(2));
    bar.setAttribute("class", count ? "hit" : "miss");
    return bar;
  });
  svg.replaceChildren(...bars);
  const mean = passes.reduce((sum, count) => sum + count, 0) / passes.length;
  const label = passes.length ? `${mean.toFixed(1)} on average over ${passes.length} passes` : "none yet";
  svg.setAttribute("aria-label", `Accepted drafts per pass: ${label}`);
  return shown.length ? Math.max(...shown) : null;
}

function ratio(part, whole, word) {
  return whole > 0 ? word(part / whole) : "–";
}

function percent(share) {
  return `${Math.round(share * 100)} %`;
}

function duration(milliseconds) {
  return milliseconds < 1000 ? `${Math.round(milliseconds)} ms` : `${(milliseconds / 1000).toFixed(1)} s`;
}
