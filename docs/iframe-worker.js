// Browsers start no worker for a page that was opened as a file. The site's search then runs in a frame of the page.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.answer = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = new URL(url, document.baseURI).href.replaceAll('"', "%22");
      frame.srcdoc =
        `<script>{ const { answer } = frameElement; window.postMessage = (data) => answer(data); }</script>` +
        `<script src="${script}"></script>`;
      this.frame = new Promise((ready) => frame.addEventListener("load", () => ready(frame.contentWindow)));
      document.documentElement.append(frame);
    }

    async postMessage(data) {
      const frame = await this.frame;
      frame.dispatchEvent(new frame.MessageEvent("message", { data }));
    }
  };
}
