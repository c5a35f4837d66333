// The mask register, as the vendor's checks ask for it.
#pragma once

#include <cstdint>

uint64_t ModelFactoryGetMaskHigh();
uint64_t ModelFactoryGetMaskLow();
int ModelFactoryGetMaskMode();
