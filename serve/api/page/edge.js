// The latest answer of a device that drafts itself: asked for again and again while the page is visible.

import { fetchEdgeSessions } from "./stream.js";

const SOON = 500; // milliseconds between two looks while an answer comes
const LATER = 5000;
const byId = (id) => document.getElementById(id);

/** Shows the sessions of devices; `key` gives the API key. */
export class EdgePanel {
  constructor(key) {
    this.key = key;
    this.timer = null;
  }

  /** Begin to look, or end it where the server has nothing for devices. */
  watch(isServed) {
    clearTimeout(this.timer);
    byId("edge").hidden = true;
    if (isServed) this.look();
  }

  async look() {
    let session = null;
    if (document.visibilityState === "visible") {
      try {
        [session = null] = await fetchEdgeSessions(this.key());
        this.show(session);
      } catch {
        byId("edge").hidden = true; // the server is gone, or wants another key: the page says so elsewhere
      }
    }
    this.timer = setTimeout(() => this.look(), session && !session.is_finished ? SOON : LATER);
  }

  show(session) {
    byId("edge").hidden = session === null;
    if (session === null) return;
    const tokens = `${session.num_tokens.toLocaleString("en")} tokens`;
    byId("edge-state").textContent = `${session.drafter}, ${tokens}${session.is_finished ? ", complete" : ""}`;
    for (const part of ["verified", "retracted", "unverified"]) {
      byId(`edge-${part}`).textContent = session.is_finished && part !== "verified" ? "" : session[part];
    }
  }
}
