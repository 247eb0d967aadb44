// A service that compiles many functions and keeps many objects. It answers with what does not depend on when
// and where it was started.
'use strict';
const http = require('http');
for (const name of require('module').builtinModules)
	if (!name.includes('/') && !['inspector', 'repl', 'trace_events', 'wasi', 'test'].includes(name))
		require(name);

const handlers = [];
for (let number = 0; number < 8000; number++) {
	const body = `let sum = ${number}; for (let i = 0; i < n; i++) sum = (sum * 31 + i) % 1000003; return sum;`;
	handlers.push(new Function('n', body));
}
const items = Array.from({ length: 300000 }, (_, number) => ({ number, name: `item ${number}` }));
let warm = 0;
for (let round = 0; round < 40; round++)
	for (const handler of handlers)
		warm = (warm + handler(50)) % 1000003;

http.createServer((request, response) => {
	response.end(`${items[299999].name} ${warm} ${handlers[777](1000)}\n`);
}).listen(8080, '127.0.0.1');
