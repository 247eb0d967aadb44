// A Spring Boot service that is warm. It answers with what does not depend on when and where it was started.
package service;

import java.util.TreeMap;
import org.springframework.boot.SpringApplication;
import org.springframework.boot.autoconfigure.SpringBootApplication;
import org.springframework.context.ApplicationContext;
import org.springframework.web.bind.annotation.GetMapping;
import org.springframework.web.bind.annotation.RestController;

@SpringBootApplication
@RestController
public class Application {
	private final TreeMap<Integer, String> items = new TreeMap<>();
	private final ApplicationContext context;
	private final long warm;

	Application(ApplicationContext context) {
		this.context = context;
		for (int i = 0; i < 200000; i++)
			items.put(i, "item " + i);
		warm = work(20000000);
	}

	private long work(int rounds) {
		long sum = 0;
		for (int i = 0; i < rounds; i++)
			sum = sum * 31 + items.get(i % items.size()).hashCode();
		return sum;
	}

	@GetMapping("/")
	String answer() {
		return context.getBeanDefinitionCount() + " " + warm + " " + work(1000) + "\n";
	}

	public static void main(String[] args) {
		SpringApplication.run(Application.class, "--server.address=127.0.0.1", "--server.port=8080");
	}
}
