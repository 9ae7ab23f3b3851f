// SPDX-License-Identifier: Apache-2.0 OR MIT
// An echo server and its client, over Java's sockets: `Streams serve HOST PORT`, `Streams ask HOST PORT BYTES`. The
// client sends BYTES over four connections at once: two use blocking streams and two threads each, two use a
// SocketChannel. It prints on how many of them it received what it sent. The server serves all with one selector.
import java.io.*;
import java.net.*;
import java.nio.ByteBuffer;
import java.nio.channels.*;
import java.util.*;

public class Streams {
    public static void main(String[] words) throws Exception {
        InetSocketAddress address = new InetSocketAddress(words[1], Integer.parseInt(words[2]));
        if (words[0].equals("serve")) {
            serve(address);
            return;
        }
        long size = Long.parseLong(words[3]) / 4;
        List<Thread> threads = new ArrayList<>();
        int[] whole = {0};
        for (int n = 0; n < 4; n++) {
            int seed = n;
            Thread thread = new Thread(() -> {
                try {
                    if (seed < 2) overStreams(address, seed, size);
                    else overChannels(address, seed, size);
                    synchronized (whole) {
                        whole[0]++;
                    }
                } catch (IOException | InterruptedException error) {
                    error.printStackTrace();
                }
            });
            thread.start();
            threads.add(thread);
        }
        for (Thread thread : threads) thread.join();
        System.out.println("whole: " + whole[0]);
    }

    static void serve(InetSocketAddress address) throws IOException {
        Selector selector = Selector.open();
        ServerSocketChannel listener = ServerSocketChannel.open();
        listener.bind(address);
        listener.configureBlocking(false);
        listener.register(selector, SelectionKey.OP_ACCEPT);
        while (true) {
            selector.select();
            for (Iterator<SelectionKey> keys = selector.selectedKeys().iterator(); keys.hasNext(); ) {
                SelectionKey key = keys.next();
                keys.remove();
                if (key.isAcceptable()) {
                    SocketChannel end = listener.accept();
                    end.configureBlocking(false);
                    end.register(selector, SelectionKey.OP_READ, ByteBuffer.allocateDirect(1 << 18));
                } else {
                    echo(key);
                }
            }
        }
    }

    static void echo(SelectionKey key) throws IOException {
        SocketChannel end = (SocketChannel) key.channel();
        ByteBuffer bytes = (ByteBuffer) key.attachment();
        boolean ended = key.isReadable() && end.read(bytes) < 0;
        bytes.flip();
        end.write(bytes);
        while (ended && bytes.hasRemaining()) end.write(bytes);
        bytes.compact();
        if (ended) {
            end.close();
            return;
        }
        int write = bytes.position() > 0 ? SelectionKey.OP_WRITE : 0;
        key.interestOps(write | (bytes.hasRemaining() ? SelectionKey.OP_READ : 0));
    }

    /** The bytes that a connection sends: one random block, repeated. Its length is no multiple of a buffer size. */
    static final class Pattern {
        private final byte[] block = new byte[1_000_003];

        Pattern(int seed) {
            new Random(seed).nextBytes(block);
        }

        byte[] at(long from, int size) {
            byte[] bytes = new byte[size];
            for (int done = 0; done < size; ) {
                int begin = (int) ((from + done) % block.length);
                int n = Math.min(size - done, block.length - begin);
                System.arraycopy(block, begin, bytes, done, n);
                done += n;
            }
            return bytes;
        }

        void check(long from, byte[] came, int size) throws IOException {
            if (!Arrays.equals(at(from, size), 0, size, came, 0, size)) throw new IOException("other bytes at " + from);
        }
    }

    /** Length of the part that begins at `at`, of `size` bytes in all. Lengths vary. */
    static int part(long at, long size) {
        return (int) Math.min(1 + (at * 7919 & 0x3ffff), size - at);
    }

    /** Bytes that are exchanged in small parts before the bulk. */
    static final int GREETING = 40 * 500;

    /** Sends and receives at the same time: one thread writes while another reads, and both block. */
    static void overStreams(InetSocketAddress address, int seed, long size) throws IOException, InterruptedException {
        Pattern pattern = new Pattern(seed);
        try (Socket end = new Socket(address.getAddress(), address.getPort())) {
            InputStream in = end.getInputStream();
            OutputStream out = end.getOutputStream();
            // First each part is read back before the next is written. Otherwise chance decides how many bytes are in the
            // socket buffers, and so stay on TCP, when the connection moves to shared memory.
            for (int at = 0; at < GREETING; at += 500) {
                out.write(pattern.at(at, 500));
                pattern.check(at, in.readNBytes(500), 500);
            }
            Thread writer = new Thread(() -> {
                try {
                    for (long at = GREETING; at < size; at += part(at, size)) out.write(pattern.at(at, part(at, size)));
                    end.shutdownOutput();
                } catch (IOException error) {
                    error.printStackTrace();
                }
            });
            writer.start();
            byte[] came = new byte[200_000];
            long at = GREETING;
            for (int n; (n = in.read(came)) >= 0; at += n) pattern.check(at, came, n);
            if (at != size) throw new EOFException(at + " of " + size + " bytes");
            writer.join();
        }
    }

    /** Writes each part from two buffers with one call, and reads its echo before it writes the next part. */
    static void overChannels(InetSocketAddress address, int seed, long size) throws IOException {
        Pattern pattern = new Pattern(seed);
        try (SocketChannel end = SocketChannel.open(address)) {
            for (long at = 0, next; at < size; at = next) {
                int n = part(at, size);
                next = at + n;
                byte[] sent = pattern.at(at, n);
                ByteBuffer[] parts = {ByteBuffer.wrap(sent, 0, n / 3), ByteBuffer.wrap(sent, n / 3, n - n / 3)};
                ByteBuffer back = ByteBuffer.allocate(n);
                while (parts[1].hasRemaining()) end.write(parts);
                while (back.hasRemaining()) if (end.read(back) < 0) throw new EOFException();
                pattern.check(at, back.array(), n);
            }
        }
    }
}
