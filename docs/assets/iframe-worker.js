// Search runs in a worker, and a page that lies on a disk may start none. There a hidden frame takes
// its place: it runs the worker's script, and messages go to and fro as events.
(() => {
  if (location.protocol !== "file:") return;

  class FrameWorker extends EventTarget {
    constructor(script) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.loaded = new Promise((resolve) => frame.addEventListener("load", resolve));
      this.inside.answer = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.inside.load = (urls) => urls.reduce(
        (before, src) => before.then(() => append(this.inside.document, src)), Promise.resolve(),
      );
      this.inside.document.write(
        "<body><script>postMessage = answer; importScripts = (...urls) => load(urls)<\/script>" +
        `<script src="${script}"><\/script></body>`,
      );
      this.inside.document.close();
    }

    async postMessage(data) {
      await this.loaded;
      this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data }));
    }
  }

  function append(page, src) {
    return new Promise((onload, onerror) => {
      page.body.append(Object.assign(page.createElement("script"), { src, onload, onerror }));
    });
  }

  window.Worker = FrameWorker;
})();
