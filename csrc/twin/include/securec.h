// The bounded copies (C11, annex K) that the vendor's checks use.
#pragma once

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstring>

using errno_t = int;
#ifndef EOK
#define EOK 0
#endif
#define SECUREC_MEM_MAX_LEN 0x7fffffffUL

inline errno_t memset_s(void* to, size_t room, int value, size_t bytes) {
  if (bytes > room) return ERANGE;
  std::memset(to, value, bytes);
  return EOK;
}
inline errno_t memcpy_s(void* to, size_t room, const void* from, size_t bytes) {
  if (bytes > room) return ERANGE;
  std::memcpy(to, from, bytes);
  return EOK;
}
inline errno_t strcpy_s(char* to, size_t room, const char* from) {
  if (std::strlen(from) >= room) return ERANGE;
  std::strcpy(to, from);
  return EOK;
}
inline int snprintf_s(char* to, size_t room, size_t bytes, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const int count = std::vsnprintf(to, room < bytes ? room : bytes, format, arguments);
  va_end(arguments);
  return count;
}
inline int sprintf_s(char* to, size_t room, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const int count = std::vsnprintf(to, room, format, arguments);
  va_end(arguments);
  return count;
}
