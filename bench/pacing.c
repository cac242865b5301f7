/* Gives each TCP socket that a process makes a rate that the kernel sends at most at: a slow link on one machine.
 *
 * Preloaded into a process, it replaces the C library's socket(). Accepted sockets get the rate of the one that
 * listens from the kernel. The rate, in bytes per second and each way, is in the environment: PACED_TO.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

int socket(int domain, int type, int protocol) {
    int made = (int)syscall(SYS_socket, domain, type, protocol);
    const char *rate = getenv("PACED_TO");
    /* The lowest bits are the type, the others flags. */
    if (made < 0 || !rate || (domain != AF_INET && domain != AF_INET6) || (type & 15) != SOCK_STREAM) return made;
    unsigned int bytes = (unsigned int)strtoul(rate, NULL, 10);
    if (setsockopt(made, SOL_SOCKET, SO_MAX_PACING_RATE, &bytes, sizeof bytes) == 0) return made;
    close(made);
    return -1;
}
