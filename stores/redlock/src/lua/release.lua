-- Gives the lock back, if it is ours and no later round's. KEYS: L, V; ARGV: attempt, round (0: any), channel.
local attempt, round = ARGV[1], tonumber(ARGV[2])
if value_of(KEYS[1]) ~= attempt then return 0 end
local v = vote(KEYS[2], attempt)
if v and round > 0 and v.round > round then return 0 end
redis.call('DEL', KEYS[1], KEYS[2])
-- A lock that had no fence yet was never anybody's: nobody waits for that.
if v and v.fence > 0 then publish(ARGV[3], v.fence) end
return 1
