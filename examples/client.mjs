// Ask a daemon, with nothing but Node: node examples/client.mjs SOCKET PROMPT
import { connect } from "node:net";
import { createInterface } from "node:readline";

async function* ask(path, request) {
  const daemon = connect(path);
  try {
    daemon.write(JSON.stringify(request) + "\n");
    for await (const line of createInterface({ input: daemon })) {
      const reply = JSON.parse(line);
      if ("error" in reply) throw new Error(reply.error);
      yield reply;
    }
  } finally {
    daemon.destroy(); // hanging up stops the work
  }
}

const [path, prompt] = process.argv.slice(2);
for await (const { token } of ask(path, { prompt, stream: true })) process.stdout.write(token ?? "\n");
