// The conversation as it is shown. All text goes in as text nodes, never as markup.

/** The list of turns, which keeps its end in sight unless the reader has scrolled away. */
export class Transcript {
  constructor(box) {
    this.box = box;
    this.sticks = true;
    box.addEventListener("scroll", () => {
      this.sticks = box.scrollHeight - box.scrollTop - box.clientHeight < 48;
    });
  }

  addQuestion(text) {
    const turn = element("article", "turn question");
    turn.append(element("h3", "unseen", "You"), element("p", "text", text));
    this.sticks = true;
    this.append(turn);
    return turn;
  }

  addAnswer() {
    const answer = new Answer();
    this.append(answer.turn);
    return answer;
  }

  append(turn) {
    this.box.append(turn);
    this.follow();
  }

  follow() {
    if (this.sticks) this.box.scrollTop = this.box.scrollHeight;
  }

  clear() {
    for (const turn of this.box.querySelectorAll(".turn")) turn.remove();
  }
}

/** One answer while it comes. */
class Answer {
  constructor() {
    this.text = "";
    this.turn = element("article", "turn answer waiting");
    this.turn.setAttribute("aria-busy", "true"); // read aloud once it is whole, not token by token
    this.body = element("p", "text");
    this.turn.append(element("h3", "unseen", "Answer"), this.body);
  }

  /** A chunk's pieces; refused drafts stand where the target's own token took their place. */
  add({ pieces, rejected }) {
    const drafted = pieces.filter((piece) => piece.drafted);
    const own = pieces.filter((piece) => !piece.drafted);
    const inOrder = pieces.every((piece, index) => piece.drafted === index < drafted.length);
    if (!inOrder) {
      for (const piece of pieces) this.write(piece.drafted ? "drafted" : "own", piece.text);
      this.refuse(rejected);
      return;
    }
    for (const piece of drafted) this.write("drafted", piece.text);
    this.refuse(rejected);
    for (const piece of own) this.write("own", piece.text);
  }

  write(kind, text) {
    if (!text) return;
    this.turn.classList.remove("waiting");
    this.text += text;
    this.put(kind, text);
  }

  refuse(text) {
    if (text) this.put("refused", text.replace(/\s*\n\s*/g, "↵"));
  }

  put(kind, text) {
    const last = this.body.lastElementChild;
    if (last?.className === kind) {
      last.firstChild.appendData(text);
      return;
    }
    const span = element("span", kind, text);
    if (kind === "refused") span.setAttribute("aria-hidden", "true");
    this.body.append(span);
  }

  /** The end: figures, and what has to be said or can be done. */
  finish(summary, note = "", retry = null) {
    this.turn.classList.remove("waiting");
    this.turn.removeAttribute("aria-busy");
    this.turn.append(element("p", "caption", summary));
    if (!note) return;
    const line = element("p", retry ? "note broken" : "note", note);
    if (retry) {
      const button = element("button", "quiet", "Try again");
      button.type = "button";
      button.addEventListener("click", retry);
      line.append(" ", button);
    }
    this.turn.append(line);
  }
}

function element(tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  if (text) made.textContent = text;
  return made;
}
