// Search from a folder: browsers give a page that was opened as a file no Worker, so its script runs in a hidden frame.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      this.inside = frame.contentWindow
      this.inside.answer = data => {
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        this.onmessage?.(event)
      }
      this.inside.document.open()
      this.inside.document.write(
        "<script>postMessage = data => answer(data);" +
        "importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise(done => {" +
        "const s = document.createElement('script'); s.src = url; s.onload = done; document.body.appendChild(s) })), Promise.resolve())" +
        "</script><body><script src=\"" + url + "\"></script></body>"
      )
      this.inside.document.close()
      this.ready = new Promise(done => frame.addEventListener("load", done))
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {}
  }
}
