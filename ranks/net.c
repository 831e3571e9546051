#define _GNU_SOURCE // accept4

#include "net.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

const char *net_name(char out[NET_NAME], const char *host, int port) {
    bool colons = strchr(host, ':') != NULL;
    snprintf(out, NET_NAME, "%s%s%s:%d", colons ? "[" : "", host, colons ? "]" : "", port);
    return out;
}

static int resolve(const char *host, int port, bool numeric, struct addrinfo **found) {
    char service[16];
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV};
    snprintf(service, sizeof(service), "%d", port);
    if (numeric) { hints.ai_flags |= AI_NUMERICHOST; }
    return getaddrinfo(host, service, &hints, found);
}

static void set_option(int file, int level, int name, int value) {
    setsockopt(file, level, name, &value, sizeof(value)); // what fails here costs no correctness
}

static int listen_on(int family, const struct sockaddr *address, socklen_t length) {
    int file = socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (file < 0) { return -1; }
    set_option(file, SOL_SOCKET, SO_REUSEADDR, 1);
    if (family == AF_INET6) { set_option(file, IPPROTO_IPV6, IPV6_V6ONLY, 0); }
    if (bind(file, address, length) == 0 && listen(file, SOMAXCONN) == 0) { return file; }
    int why = errno;
    close(file);
    errno = why;
    return -1;
}

// Of this machine, in IPv6 and with it in IPv4; in IPv4 alone where there is no IPv6.
static int listen_everywhere(int port) {
    struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port)};
    struct sockaddr_in four = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    int file = listen_on(AF_INET6, (struct sockaddr *)&six, sizeof(six));
    if (file >= 0 || (errno != EAFNOSUPPORT && errno != EADDRNOTAVAIL)) { return file; }
    return listen_on(AF_INET, (struct sockaddr *)&four, sizeof(four));
}

int net_listen(const char *host, int port, Error *err) {
    char name[NET_NAME];
    struct addrinfo *found;
    int file = -1;
    bool address = strcmp(host, "localhost") == 0 || resolve(host, port, true, &found) == 0;
    if (!address) {
        file = listen_everywhere(port);
    } else if (strcmp(host, "localhost") != 0 || resolve(host, port, false, &found) == 0) {
        for (struct addrinfo *a = found; a != NULL && file < 0; a = a->ai_next) {
            file = listen_on(a->ai_family, a->ai_addr, a->ai_addrlen);
        }
        int why = errno;
        freeaddrinfo(found);
        errno = why;
    }
    if (file >= 0) { return file; }
    const char *advice = strerror(errno);
    if (errno == EADDRINUSE) {
        advice = "another process has the port; set MASTER_PORT to a free one";
    } else if (errno == EADDRNOTAVAIL) {
        advice = "not an address of this machine; MASTER_ADDR must be the one rank 0 runs on";
    }
    fail(err, "rank 0 cannot listen on %s: %s", net_name(name, host, port), advice);
    return -1;
}

int net_port(int file) {
    union {
        struct sockaddr any;
        struct sockaddr_in four;
        struct sockaddr_in6 six;
    } address;
    socklen_t length = sizeof(address);
    if (getsockname(file, &address.any, &length) != 0) { return 0; }
    return ntohs(address.any.sa_family == AF_INET6 ? address.six.sin6_port : address.four.sin_port);
}

// Waits for events; 0 once `until` has passed.
static int wait_for(int file, short events, double until) {
    for (;;) {
        struct pollfd p = {.fd = file, .events = events};
        double left = until - wall_seconds();
        int ms = left <= 0 ? 0 : (left > 3600 ? 3600000 : (int)ceil(1e3 * left));
        int ready = poll(&p, 1, ms);
        if (ready > 0 || (ready < 0 && errno != EINTR)) { return ready; }
        if (ready == 0 && left <= ms * 1e-3) { return 0; }
    }
}

// Small messages at once, and a dead machine noticed some day even where nothing else does.
static void set_up(int file) {
    set_option(file, IPPROTO_TCP, TCP_NODELAY, 1);
    set_option(file, SOL_SOCKET, SO_KEEPALIVE, 1);
}

int net_accept(int listener, double until) {
    while (wait_for(listener, POLLIN, until) > 0) {
        int file = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (file >= 0) {
            set_up(file);
            return file;
        }
        if (errno != EINTR && errno != ECONNABORTED && errno != EAGAIN) { break; }
    }
    return -1;
}

// A port that no one listens on can be given to the very socket that wants to connect to it.
static bool is_own_echo(int file) {
    struct sockaddr_storage here = {0}, there = {0};
    socklen_t length = sizeof(here), other = sizeof(there);
    return getsockname(file, (struct sockaddr *)&here, &length) == 0 &&
           getpeername(file, (struct sockaddr *)&there, &other) == 0 && length == other &&
           memcmp(&here, &there, length) == 0;
}

static int connect_once(const struct addrinfo *a, double until) {
    int file = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), why = 0;
    socklen_t length = sizeof(why);
    if (file < 0) { return -1; }
    if (connect(file, a->ai_addr, a->ai_addrlen) != 0) {
        why = errno;
        if (why == EINPROGRESS) {
            why = wait_for(file, POLLOUT, until) > 0 ? 0 : ETIMEDOUT;
            if (why == 0 && getsockopt(file, SOL_SOCKET, SO_ERROR, &why, &length) != 0) {
                why = errno;
            }
        }
    }
    if (why == 0 && is_own_echo(file)) { why = ECONNREFUSED; }
    if (why == 0 && fcntl(file, F_SETFL, 0) == 0) {
        set_up(file);
        return file;
    }
    close(file);
    errno = why;
    return -1;
}

// One round over the host's addresses; why: of the last that failed.
static int connect_round(const char *host, int port, double until, const char **why) {
    struct addrinfo *found;
    int file = -1, status = resolve(host, port, false, &found);
    if (status != 0) {
        *why = status == EAI_SYSTEM ? strerror(errno) : gai_strerror(status);
        return -1;
    }
    for (struct addrinfo *a = found; a != NULL && file < 0; a = a->ai_next) {
        file = connect_once(a, fmin(until, wall_seconds() + 10));
        if (file < 0) { *why = strerror(errno); }
    }
    freeaddrinfo(found);
    return file;
}

int net_connect(const char *host, int port, double until, Error *err) {
    char name[NET_NAME];
    const char *why = "";
    double begin = wall_seconds(), told = begin, pause = 0.01;
    for (;;) {
        int file = connect_round(host, port, until, &why);
        if (file >= 0) { return file; }
        double now = wall_seconds();
        if (now + pause >= until) { break; }
        if (now - told >= 10) {
            warn("waiting for rank 0 at %s: %s", net_name(name, host, port), why);
            told = now + 50; // then once a minute
        }
        nanosleep(&(struct timespec){0, (long)(1e9 * pause)}, NULL);
        pause = fmin(2 * pause, 0.5);
    }
    fail(err,
         "rank 0 was not reached at %s within %.0f s (--distributed-timeout): %s; are MASTER_ADDR "
         "and MASTER_PORT those of rank 0, and does it run?",
         net_name(name, host, port), until - begin, why);
    return -1;
}

bool net_send(int file, const void *data, size_t bytes) {
    const char *from = data;
    while (bytes > 0) {
        ssize_t sent = send(file, from, bytes, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR) { continue; }
        if (sent <= 0) { return false; }
        from += sent;
        bytes -= (size_t)sent;
    }
    return true;
}

bool net_receive(int file, void *data, size_t bytes, double until) {
    char *to = data;
    while (bytes > 0) {
        int ready = until < NET_FOREVER ? wait_for(file, POLLIN, until) : 1;
        if (ready == 0) { errno = ETIMEDOUT; }
        ssize_t got = ready > 0 ? recv(file, to, bytes, 0) : -1;
        if (got < 0 && ready > 0 && errno == EINTR) { continue; }
        if (got == 0) { errno = 0; }
        if (got <= 0) { return false; }
        to += got;
        bytes -= (size_t)got;
    }
    return true;
}

const char *net_reason(void) {
    return errno == 0 ? "it closed the connection" : strerror(errno);
}

bool net_closed(int file) {
    char byte;
    ssize_t got = recv(file, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return got == 0 || (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
}
