// An HTTP server as each Go program has it. Each connection has a sum: a request for /5 adds 5 to
// it, and the answer is the sum and what a goroutine in the background has counted. It also keeps
// the garbage collector busy.
package main

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"strconv"
	"sync/atomic"
	"time"
)

type sumKey struct{}

var counted atomic.Uint64

func count() {
	ballast := map[string][]byte{}
	for n := 0; ; n++ {
		ballast[strconv.Itoa(n%1000)] = make([]byte, 1000+n%1000)
		counted.Add(1)
		if n%100 == 0 {
			time.Sleep(time.Millisecond)
		}
	}
}

func add(answer http.ResponseWriter, request *http.Request) {
	number, err := strconv.ParseUint(request.URL.Path[1:], 10, 64)
	if err != nil {
		http.Error(answer, err.Error(), http.StatusBadRequest)
		return
	}
	// Requests of one connection come one after another.
	sum := request.Context().Value(sumKey{}).(*uint64)
	*sum += number
	fmt.Fprintf(answer, "%d %d\n", *sum, counted.Load())
}

func main() {
	go count()
	server := http.Server{
		Addr:        "127.0.0.1:" + os.Args[1],
		Handler:     http.HandlerFunc(add),
		ConnContext: func(ctx context.Context, _ net.Conn) context.Context { return context.WithValue(ctx, sumKey{}, new(uint64)) },
	}
	fmt.Println(server.ListenAndServe())
	os.Exit(1)
}
