import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.file.Files;
import java.nio.file.Path;
import org.apache.curator.framework.CuratorFramework;
import org.apache.curator.framework.CuratorFrameworkFactory;
import org.apache.curator.framework.recipes.locks.InterProcessMutex;
import org.apache.curator.retry.ExponentialBackoffRetry;

/** Curator's own mutex, told what to do line by line. */
public class Contender {
    static CuratorFramework open(String server) {
        CuratorFramework client =
            CuratorFrameworkFactory.newClient(server, 4000, 15000, new ExponentialBackoffRetry(100, 10));
        client.start();
        return client;
    }

    static void count(String server, String path, Path counter, int rounds) throws Exception {
        try (CuratorFramework client = open(server)) {
            InterProcessMutex mutex = new InterProcessMutex(client, path);
            for (int i = 0; i < rounds; i++) {
                mutex.acquire();
                long n = Long.parseLong(Files.readString(counter).trim());
                Thread.sleep(2);
                Files.writeString(counter, Long.toString(n + 1));
                mutex.release();
            }
        }
    }

    public static void main(String[] args) throws Exception {
        String server = args[0], path = args[1];
        Path counter = Path.of(args[2]);
        CuratorFramework client = open(server);
        client.blockUntilConnected();
        InterProcessMutex mutex = new InterProcessMutex(client, path);
        BufferedReader orders = new BufferedReader(new InputStreamReader(System.in));
        System.out.println("ready");
        for (String order = orders.readLine(); order != null; order = orders.readLine()) {
            String[] words = order.split(" ");
            switch (words[0]) {
                case "acquire":
                    mutex.acquire();
                    System.out.println("acquired");
                    break;
                case "release":
                    mutex.release();
                    System.out.println("released");
                    break;
                case "count":
                    Thread[] threads = new Thread[3];
                    for (int i = 0; i < threads.length; i++) {
                        threads[i] = new Thread(() -> {
                            try {
                                count(server, path, counter, Integer.parseInt(words[1]));
                            } catch (Exception e) {
                                e.printStackTrace();
                                System.exit(1);
                            }
                        });
                        threads[i].start();
                    }
                    for (Thread thread : threads) {
                        thread.join();
                    }
                    System.out.println("counted");
                    break;
                default:
                    throw new IllegalArgumentException(order);
            }
        }
    }
}
