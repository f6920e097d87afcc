// One scenario of the Node client: `node main.js NAMESRV TOPIC`. Fifty messages with tags, keys and a
// property; one consumer takes all of them and has one come again, others filter by tag and by SQL92.
'use strict';

const httpclient = require('urllib');
const { Consumer, Message, Producer } = require('ali-ons');

const [ , , nameSrv, topic ] = process.argv;
const PATIENCE_MS = 60000;
const logger = { info() {}, debug() {}, warn() {}, error: console.error };
// The client insists on keys; a server without access control does not look at them.
const base = { httpclient, nameSrv, accessKeyId: 'any', accessKeySecret: 'any', logger };

async function consume(group, expression, into) {
  const consumer = new Consumer({
    ...base, consumerGroup: `${topic}-${group}`, consumeFromWhere: 'CONSUME_FROM_FIRST_OFFSET',
  });
  consumer.on('error', console.error);
  consumer.subscribe(topic, expression, async message => {
    const body = message.body.toString();
    if (group === 'all' && body === '7' && message.reconsumeTimes === 0) return Consumer.ACTION_RETRY;
    into.push(`${body}/${message.reconsumeTimes}`);
  });
  await consumer.ready();
  return consumer;
}

async function main() {
  const producer = new Producer({ ...base, producerGroup: `${topic}-producers` });
  producer.on('error', console.error);
  await producer.ready();
  for (let number = 0; number < 50; number++) {
    const message = new Message(topic, number % 2 ? 'odd' : 'even', String(number));
    message.keys = [ `key-${number}` ];
    message.properties.number = String(number);
    const result = await producer.send(message);
    if (result.sendStatus !== 'SEND_OK') throw new Error(JSON.stringify(result));
  }
  const seen = { all: [], odd: [], late: [] };
  const consumers = [
    await consume('all', '*', seen.all),
    await consume('odd', 'odd', seen.odd),
    await consume('late', { expressionType: 'SQL92', subString: 'number > 40' }, seen.late),
  ];
  const ends = Date.now() + PATIENCE_MS;
  const count = () => seen.all.length + seen.odd.length + seen.late.length;
  while (count() < 50 + 25 + 9 && Date.now() < ends) await new Promise(go => setTimeout(go, 100));
  await Promise.all(consumers.map(one => one.close()));
  await producer.close();
  console.log(JSON.stringify(seen));
}

main().then(() => process.exit(0), error => { console.error(error); process.exit(1); });
