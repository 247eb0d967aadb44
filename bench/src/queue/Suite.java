import java.io.File;
import java.util.*;

/** Runs args[0] tests, each of which sorts and compares for a tenth of a second. The last quarter of them waits until the file
 *  args[1] is there, if it is named. */
public class Suite {
    public static void main(String[] args) throws InterruptedException {
        int passed = 0, wanted = Integer.parseInt(args[0]);
        for (int test = 0; test < wanted; test++) {
            while (test == wanted / 4 * 3 && args.length > 1 && !new File(args[1]).exists()) Thread.sleep(20);
            boolean right = isRight(new Random(test));
            System.out.println("test " + test + (right ? ": right" : ": wrong"));
            if (right) passed++;
        }
        System.out.println("passed " + passed);
        System.exit(passed == wanted ? 4 : 1);
    }

    private static boolean isRight(Random random) {
        long end = System.nanoTime() + 100_000_000L;
        boolean right = true;
        while (System.nanoTime() < end) {
            int[] numbers = random.ints(20_000).toArray(), copy = numbers.clone();
            Arrays.sort(numbers);
            TreeMap<Integer, Integer> map = new TreeMap<>();
            for (int number : copy) map.merge(number, 1, Integer::sum);
            int at = 0;
            for (var entry : map.entrySet())
                for (int i = 0; i < entry.getValue(); i++) right &= numbers[at++] == entry.getKey();
        }
        return right;
    }
}
