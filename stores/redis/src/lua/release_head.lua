-- Gives back a hold, or leaves the line. KEYS as for acquire.
local COUNTER, WATCHED, CLIENT = KEYS[1], KEYS[2], KEYS[3]
local attempt, client, BASE, CLAIM = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])

-- The plain case: one holder, nothing that outlasts it. While its key is there, it is not over.
local freed = false
if #KEYS == 6 then
  local known = redis.call('MGET', KEYS[4], KEYS[5], WATCHED)
  if known[1] == attempt and known[2] then
    local who, _, fence, _, _, stays, _, delay, _, flags, _, info, at =
      struct.unpack('>c32c32ddddI4I4I4BI4c0I2c0', known[2])
    if who == attempt and flags <= 1 and stays == 0 and delay == 0 and at > #known[2] then
      redis.call('DEL', KEYS[4], KEYS[5])
      if known[3] then
        local time = redis.call('TIME')
        redis.call('PUBLISH', known[3], string.format('released %.0f %.0f %d ', fence, time[1] * 1000000 + time[2],
          #KEYS[4]) .. KEYS[4] .. info)
      end
      freed = true
      if redis.call('EXISTS', KEYS[6]) == 0 then return 1 end
    end
  end
end
