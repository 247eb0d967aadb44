// A counter server on Node.js: each line on a connection is a number; the answer is the sum of the
// numbers on this connection and how far the timer and the worker thread have counted together.
'use strict';

const crypto = require('crypto');
const fs = require('fs');
const net = require('net');
const {Worker, isMainThread, workerData} = require('worker_threads');

if (isMainThread) {
    const shared = new SharedArrayBuffer(8);
    const counters = new Int32Array(shared);
    new Worker(__filename, {workerData: shared}).on('error', error => { throw error; });
    setInterval(() => Atomics.add(counters, 0, 1), 1);
    // The pool of libuv has work too.
    setInterval(() => fs.readFile(__filename, error => { if (error) throw error; }), 5);

    net.createServer(socket => {
        let sum = 0;
        let rest = '';
        socket.on('data', data => {
            const lines = (rest + data).split('\n');
            rest = lines.pop();
            for (const line of lines) {
                sum += Number(line);
                socket.write(`${sum} ${Atomics.load(counters, 0) + Atomics.load(counters, 1)}\n`);
            }
        });
        socket.on('error', () => {});
    }).listen(Number(process.argv[2]), '127.0.0.1');
} else {
    const counters = new Int32Array(workerData);
    setInterval(() => {
        crypto.createHash('sha256').update(crypto.randomBytes(1 << 16)).digest();
        Atomics.add(counters, 1, 1);
    }, 1);
}
