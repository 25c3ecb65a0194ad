// Another client of the same locks: node-redlock. `count.mjs FILE ROUNDS PORT...` adds one to the number in a file, so
// many times, each under the lock; then it tries once for a lock that is taken, and holds another until it is told to
// let go.
import fs from "node:fs";
import readline from "node:readline";
import { Redis } from "ioredis";
import redlock from "redlock";

const Redlock = redlock.default ?? redlock;
const [file, rounds, ...ports] = process.argv.slice(2);
const clients = ports.map((port) => new Redis(Number(port), "127.0.0.1"));
const patient = new Redlock(clients, { retryCount: -1, retryDelay: 20, retryJitter: 20 });
const impatient = new Redlock(clients, { retryCount: 0 });
const told = readline.createInterface({ input: process.stdin })[Symbol.asyncIterator]();

console.log("ready");
await told.next();
for (let i = 0; i < Number(rounds); i++) {
  const lock = await patient.acquire(["lock:counter"], 20000);
  const count = Number(fs.readFileSync(file, "utf8"));
  await new Promise((resolve) => setTimeout(resolve, 2));
  fs.writeFileSync(file, String(count + 1));
  await lock.release();
}
console.log("counted");
await told.next();
console.log(await impatient.acquire(["lock:ours"], 20000).then(() => "granted", () => "refused"));
const lock = await patient.acquire(["lock:theirs"], 20000);
console.log("holds");
await told.next();
await lock.release();
console.log("released");
process.exit(0);
