// A service on a JVM that has loaded much of its library and is warm. It answers with what does not depend on
// when and where it was started.
import com.sun.net.httpserver.HttpServer;
import java.net.InetSocketAddress;
import java.net.URI;
import java.nio.charset.StandardCharsets;
import java.nio.file.FileSystems;
import java.nio.file.Files;
import java.util.List;
import java.util.TreeMap;
import java.util.stream.Collectors;

public class Service {
	static final TreeMap<Integer, String> items = new TreeMap<>();
	static int classes;

	static long work(int rounds) {
		long sum = 0;
		for (int i = 0; i < rounds; i++)
			sum = sum * 31 + items.get(i % items.size()).hashCode();
		return sum;
	}

	// As a framework does that looks for annotations.
	static void load() throws Exception {
		var modules = FileSystems.getFileSystem(URI.create("jrt:/"));
		List<String> names;
		try (var files = Files.walk(modules.getPath("/modules/java.base/java"))) {
			names = files.map(Object::toString).filter(name -> name.endsWith(".class"))
				.map(name -> name.substring("/modules/java.base/".length(), name.length() - 6).replace('/', '.'))
				.sorted().collect(Collectors.toList());
		}
		for (String name : names) {
			try {
				Class.forName(name).getDeclaredMethods();
				classes++;
			} catch (Throwable ignored) {
				// There are some that cannot be loaded here.
			}
		}
	}

	public static void main(String[] args) throws Exception {
		load();
		for (int i = 0; i < 200000; i++)
			items.put(i, "item " + i);
		long warm = work(20000000);
		HttpServer server = HttpServer.create(new InetSocketAddress("127.0.0.1", 8080), 16);
		server.createContext("/", exchange -> {
			byte[] text = (classes + " " + warm + " " + work(1000) + "\n").getBytes(StandardCharsets.UTF_8);
			exchange.sendResponseHeaders(200, text.length);
			try (var out = exchange.getResponseBody()) {
				out.write(text);
			}
		});
		server.start();
	}
}
