import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintWriter;
import java.net.InetAddress;
import java.net.ServerSocket;
import java.net.Socket;
import java.util.ArrayDeque;
import java.util.concurrent.atomic.AtomicLong;

/**
 * A counter server with a thread for each connection, and background threads that keep the compiler
 * and the garbage collector busy.
 *
 * Each line on a connection is a number; the answer is the sum of the numbers on this connection and
 * how far the background threads have counted together.
 */
public class Server {
    private static final AtomicLong background = new AtomicLong();

    public static void main(String[] words) throws Exception {
        for (int n = 0; n < 2; n++) {
            Thread thread = new Thread(Server::work);
            thread.setDaemon(true);
            thread.start();
        }
        ServerSocket listener = new ServerSocket(Integer.parseInt(words[0]), 50, InetAddress.getLoopbackAddress());
        while (true) {
            Socket socket = listener.accept();
            new Thread(() -> serve(socket)).start();
        }
    }

    private static void work() {
        ArrayDeque<long[]> kept = new ArrayDeque<>();
        for (long round = 0;; round++) {
            long[] block = new long[1024];
            java.util.Arrays.fill(block, round);
            kept.addLast(block);
            if (kept.size() > 2000) {
                long[] oldest = kept.removeFirst();
                if (oldest[0] != round - 2000 || oldest[1023] != round - 2000) {
                    System.err.println("broken: " + oldest[0] + " in round " + round);
                    System.exit(1);
                }
            }
            background.incrementAndGet();
            if (round % 100 == 0) {
                try {
                    Thread.sleep(1);
                } catch (InterruptedException interrupted) {
                    return;
                }
            }
        }
    }

    private static void serve(Socket socket) {
        try (socket;
                BufferedReader reader = new BufferedReader(new InputStreamReader(socket.getInputStream()));
                PrintWriter writer = new PrintWriter(socket.getOutputStream(), true)) {
            long sum = 0;
            for (String line; (line = reader.readLine()) != null;) {
                sum += Long.parseLong(line);
                writer.print(sum + " " + background.get() + "\n");
                writer.flush();
            }
        } catch (java.io.IOException gone) {
            // The client went away.
        }
    }
}
