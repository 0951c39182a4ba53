// The site's search runs in a worker, and browsers give none to a page that is read from a folder.
// There its script runs in a hidden frame, which has what a worker has.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.inside = new Promise((done) => {
        this.frame.onload = () => done(this.start(url));
      });
      document.body.append(this.frame);
    }

    start(url) {
      const inside = this.frame.contentWindow;
      const load = (source) =>
        new Promise((done, failed) => {
          const script = inside.document.createElement("script");
          Object.assign(script, { src: source, onload: done, onerror: failed });
          inside.document.body.append(script);
        });
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = (...urls) =>
        urls.reduce((before, source) => before.then(() => load(source)), Promise.resolve());
      return load(url).then(() => inside);
    }

    postMessage(data) {
      this.inside.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
