// What most programs do: an answer that is not ok is an error that names its status.
const url = (globalThis.Deno?.args ?? process.argv.slice(2))[0];
const answer = await fetch(url);
if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`);
console.log(await answer.text());
