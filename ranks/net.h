// TCP between ranks: listening, connecting within a time limit, whole messages. IPv4 and IPv6.
#ifndef LLM8_NET_H
#define LLM8_NET_H

#include "../base/common.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { NET_HOST = 256, NET_NAME = NET_HOST + 16 };

// "host:port", an IPv6 address in brackets; into out, which is returned.
const char *net_name(char out[NET_NAME], const char *host, int port);

// A socket that listens for rank 0. An address, or localhost, is listened on alone; a machine's
// name can mean another address here than elsewhere (Debian's is 127.0.1.1), so that all are. Port
// 0 takes any free one.
int net_listen(const char *host, int port, Error *err);
int net_port(int file);

// Waits until `until` (wall_seconds) for a connection; -1: none came.
int net_accept(int listener, double until);

// Tries until `until`, and says what it waits for when that takes long; -1: err says why.
int net_connect(const char *host, int port, double until, Error *err);

// All of it, or false: the connection is gone (net_reason says how), or `until` has passed.
bool net_send(int file, const void *data, size_t bytes);
bool net_receive(int file, void *data, size_t bytes, double until);
#define NET_FOREVER 1e300

// After net_receive or net_send has failed.
const char *net_reason(void);

// Whether the other side has closed its end, or died.
bool net_closed(int file);

#ifdef __cplusplus
}
#endif

#endif
