// SPDX-License-Identifier: Apache-2.0 OR MIT
// Two MPI ranks: messages of growing size in turns, then a window of large ones in one direction, each checked byte by
// byte. Prints how much was received; the time of a small round trip and the speed of the window are for information.
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { LARGE = 4 << 20, WINDOW = 4 };

static void fill(unsigned char *bytes, int len, uint32_t seed) {
    for (int at = 0; at < len; at++) bytes[at] = (unsigned char)(seed = seed * 1664525u + 1013904223u, seed >> 24);
}

static void check(const unsigned char *bytes, int len, uint32_t seed) {
    for (int at = 0; at < len; at++) {
        seed = seed * 1664525u + 1013904223u;
        if (bytes[at] != (unsigned char)(seed >> 24)) {
            fprintf(stderr, "other bytes at %d of %d\n", at, len);
            MPI_Abort(MPI_COMM_WORLD, 1);
        }
    }
}

int main(int count, char **words) {
    MPI_Init(&count, &words);
    int rounds = count > 1 ? atoi(words[1]) : 100, rank, size;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (size != 2) MPI_Abort(MPI_COMM_WORLD, 1);
    int peer = 1 - rank;
    long long bytes = 0;
    unsigned char *own = malloc(LARGE), *came = malloc((size_t)LARGE * WINDOW);

    for (int len = 1; len <= LARGE; len *= 4) {
        int times = len > 1 << 16 ? rounds / 10 + 1 : rounds;
        for (int n = 0; n < times; n++) {
            uint32_t seed = (uint32_t)(len + n);
            if (rank == 0) {
                fill(own, len, seed);
                MPI_Send(own, len, MPI_BYTE, peer, n, MPI_COMM_WORLD);
                MPI_Recv(came, len, MPI_BYTE, peer, n, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
                check(came, len, ~seed);
            } else {
                MPI_Recv(came, len, MPI_BYTE, peer, n, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
                check(came, len, seed);
                fill(own, len, ~seed);
                MPI_Send(own, len, MPI_BYTE, peer, n, MPI_COMM_WORLD);
            }
            bytes += 2LL * len;
        }
    }

    MPI_Barrier(MPI_COMM_WORLD);
    double begun = MPI_Wtime();
    for (int n = 0; n < rounds * 10; n++) {
        if (rank == 0) MPI_Send(own, 8, MPI_BYTE, peer, 0, MPI_COMM_WORLD);
        MPI_Recv(came, 8, MPI_BYTE, peer, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        if (rank == 1) MPI_Send(own, 8, MPI_BYTE, peer, 0, MPI_COMM_WORLD);
    }
    double trip = (MPI_Wtime() - begun) / (rounds * 10);
    bytes += 160LL * rounds;

    fill(own, LARGE, 7);
    begun = MPI_Wtime();
    int windows = rounds / 10 + 1;
    for (int n = 0; n < windows; n++) {
        MPI_Request all[WINDOW];
        for (int at = 0; at < WINDOW; at++) {
            if (rank == 0) MPI_Isend(own, LARGE, MPI_BYTE, peer, at, MPI_COMM_WORLD, &all[at]);
            else MPI_Irecv(came + (size_t)at * LARGE, LARGE, MPI_BYTE, peer, at, MPI_COMM_WORLD, &all[at]);
        }
        MPI_Waitall(WINDOW, all, MPI_STATUSES_IGNORE);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    double speed = (double)LARGE * WINDOW * windows / (MPI_Wtime() - begun);
    bytes += (long long)LARGE * WINDOW * windows;
    for (int at = 0; rank == 1 && at < WINDOW; at++) check(came + (size_t)at * LARGE, LARGE, 7);

    if (rank == 0) printf("bytes: %lld\ntrip: %.2f us\nspeed: %.2f GB/s\n", bytes, trip * 1e6, speed / 1e9);
    MPI_Finalize();
    return 0;
}
