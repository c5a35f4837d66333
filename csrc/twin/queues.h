// Functions that the vendor's TPipe, TQue and TBuf call, by these names, in a CPU build.
#pragma once

#include <cstdint>

void AscendCBufAbsAddr(uint8_t memory, uint64_t address, uint64_t bytes);
void AscendCBufInit(uint8_t position, int scratch, uint32_t count, uint64_t address,
                    uint64_t bytes);
void AscendCBufAlloc(uint8_t memory, uint8_t position, uint64_t address, uint64_t bytes);
void AscendCBufEnque(uint8_t from, uint8_t to, uint8_t position, uint64_t address);
void AscendCBufDeque(uint8_t from, uint8_t to, uint8_t position, uint64_t address);
void AscendCBufFree(uint8_t memory, uint8_t position, uint64_t address, uint64_t bytes);
void AscendCBufGet(uint8_t position, uint8_t memory, uint64_t address, uint64_t bytes);
void AscendCQueCreate(uint8_t from, uint8_t to, uint8_t depth);
void AscendCTBufPoolInit(uint8_t position, uint64_t address, uint32_t bytes, uint64_t id);
void AscendCUpdateTbufPoolStatus(uint64_t id, bool reset);
void AscendCTBufPoolResetCheck(uint8_t position, uint64_t address, uint64_t bytes, uint64_t id);
void AscendCRecordPoolHierarchy(uint64_t outer, uint64_t inner);
