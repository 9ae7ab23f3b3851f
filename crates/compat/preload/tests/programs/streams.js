// SPDX-License-Identifier: Apache-2.0 OR MIT
// An echo server and its client, over Node's sockets: `streams.js serve HOST PORT`, `streams.js ask HOST PORT BYTES`.
// The client sends BYTES over four connections at once, and prints on how many of them it received what it sent.
const net = require("net"), crypto = require("crypto");
const [mode, host, port, bytes] = process.argv.slice(2);

if (mode === "serve") net.createServer((end) => end.pipe(end)).listen(+port, host);

// Sends about `size` bytes over one connection, in parts. Waits for the echo of each part before the next one. Resolves
// to whether the received bytes equal the sent bytes.
function ask(seed, size) {
  return new Promise((resolve, reject) => {
    const sent = crypto.createHash("sha256"), came = crypto.createHash("sha256");
    let done = 0, waiting = 0;
    const end = net.connect(+port, host, next);
    function next() {
      if (done >= size) return end.end();
      const part = crypto.randomBytes(1 + ((seed * 7919 + done) % 300000));
      done += part.length;
      waiting = part.length;
      sent.update(part);
      end.write(part);
    }
    end.on("data", (part) => {
      came.update(part);
      waiting -= part.length;
      if (waiting === 0) next();
    });
    end.on("error", reject);
    end.on("close", () => resolve(sent.digest("hex") === came.digest("hex")));
  });
}

if (mode === "ask")
  Promise.all([0, 1, 2, 3].map((seed) => ask(seed, +bytes / 4)))
    .then((whole) => console.log("whole:", whole.filter(Boolean).length));
